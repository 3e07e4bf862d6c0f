"""Random configs, overrides, rules and schedule tables: each is read, or refused within seconds with one line for each problem."""

import yaml
from fuzzing import TEXTS, as_yaml, fuzz, mutated, spoiled, values
from hostile import VALID, assert_lines, command, read_or_refused, watched
from hypothesis import given
from hypothesis import strategies as st

from jgt import document
from jgt.rules import load_rules
from jgt.schedule.custom import read_table
from train.config import load

RULES = yaml.safe_load((VALID / "rules.yaml").read_text())
RUN = yaml.safe_load((VALID / "run.yaml").read_text()) | {"rules": RULES}
TABLE = (VALID / "table.csv").read_bytes()


yaml_texts = mutated(RUN).map(as_yaml) | spoiled(as_yaml(RUN)) | mutated(RUN, most=1).map(as_yaml).flatmap(spoiled)


@fuzz(100)
@given(yaml_texts)
def test_any_config_is_printed_or_refused(folder, data):
    (folder / "run.yaml").write_bytes(data)
    with watched(folder):
        code, out, lines = command("--config", "run.yaml", "--print-config")
    if code == 2:
        assert out == ""
        assert_lines(lines)
    else:
        assert (code, lines) == (0, [])
        (folder / "printed.yaml").write_text(out)
        assert command("--config", "printed.yaml", "--print-config") == (0, out, [])


KEYS = [
    "model.layers",
    "mesh",
    "mesh.data",
    "rules",
    "rules.signals.**.out",
    "data.path",
    "data.mixture",
    "run.name",
    "run.dir",
    "pipeline.schedule",
    "train.batch",
    "budget.x",
    "a" * 300,
    ".".join("a" * 40),
    "extends",
    "\udcff",
    "a\nb",
    "",
]


@fuzz(40)
@given(
    st.lists(
        st.tuples(st.sampled_from(KEYS), values.map(document.dump) | st.sampled_from(TEXTS)).map("=".join) | st.text(max_size=30),
        min_size=1,
        max_size=3,
    )
)
def test_any_override_is_accepted_or_refused(folder, overrides):
    (folder / "run.yaml").write_bytes(as_yaml(RUN))
    read_or_refused(folder, load, "run.yaml", overrides)


@fuzz(40)
@given(mutated(RULES).map(as_yaml) | spoiled(as_yaml(RULES)))
def test_any_rules_are_read_or_refused(folder, data):
    (folder / "any.yaml").write_bytes(data)
    rules = read_or_refused(folder, load_rules, "any.yaml")
    if rules is not None:
        read_or_refused(folder, load, "base.yaml", ["rules=any.yaml", "mesh={data: -1, stage: 1, tensor: 1}"])


@fuzz(40)
@given(
    spoiled(TABLE)
    | st.lists(
        st.lists(st.sampled_from(["F0", "B0", "F1.1", "B1.1", "W0", "-", "", "F999999999", "B0.999999999", "x" * 999]), max_size=3).map(
            ",".join
        ),
        max_size=6,
    )
    .map("\n".join)
    .map(str.encode)
)
def test_any_schedule_table_is_read_or_refused(folder, data):
    (folder / "any.csv").write_bytes(data)
    read_or_refused(folder, read_table, "any.csv")
