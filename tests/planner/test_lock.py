"""A plan's lock outlives a refactoring and breaks on a changed rule; a budget's overruns name the offender."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jgt
from jgt import document
from jgt.document import InputError
from jgt.planner.budget import Budget, Limit
from jgt.planner.plan import plan
from jgt.planner.view.report import Report
from jgt.signal import context

MESH = jgt.make_mesh({"data": 2, "tensor": 4})
RULES = {
    "axes": {"batch": ["data"]},
    "signals": {
        "layers/attn": {"params": {"in": [None, "tensor"], "out": ["tensor", None]}, "out": ["batch", None]},
        "layers/mlp": {"params": {"up": [None, "tensor"], "down": ["tensor", None]}, "out": ["batch", None]},
    },
}


def model(params, x):
    """Two blocks of two matmuls."""
    with context("layers"):
        with context("attn"):
            x = jnp.tanh(x @ params["attn"]["in"]) @ params["attn"]["out"]
        with context("mlp"):
            return jnp.tanh(x @ params["mlp"]["up"]) @ params["mlp"]["down"]


def refactored(weights, inputs):
    """The same computation, in other code."""

    def block(name, first, second, value):
        with context(name):
            hidden = jnp.tanh(value @ first)

            return hidden @ second

    attention, mlp = weights["attn"], weights["mlp"]
    with context("layers"):
        mixed = block("attn", attention["in"], attention["out"], inputs)
        return block("mlp", mlp["up"], mlp["down"], mixed)


def planned(fn=model, rules=RULES):
    """The plan of the sharded loss and its gradients."""

    def loss(params, x):
        return jnp.mean(fn(params, x) ** 2)

    params = {"attn": {"in": array(32, 64), "out": array(64, 32)}, "mlp": {"up": array(32, 96), "down": array(96, 32)}}
    made = jgt.make_rules(rules)
    where = jgt.place(loss, made, MESH, params, array(8, 32))
    step = jax.jit(jax.value_and_grad(jgt.shard(loss, made, MESH)), in_shardings=(where.params, where.inputs(array(8, 32))))
    return plan(step, params, array(8, 32))


def array(*shape):
    """The shape of an f32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(scope="module")
def original():
    """The plan that the tests compare with others and with budgets."""
    return planned()


def test_a_lock_outlives_a_refactoring(original, tmp_path):
    (tmp_path / "plan.lock").write_text(Report(original).lock)
    other = planned(refactored)
    assert {c.source for c in other.collectives}.isdisjoint({c.source for c in original.collectives})
    assert Report(other).changes(Report.read_lock(tmp_path / "plan.lock")) == []


def test_a_lock_breaks_on_a_changed_rule(original):
    rules = RULES | {"signals": RULES["signals"] | {"layers/attn": {"params": {"*": []}, "out": ["batch", None]}}}
    lines = Report(planned(rules=rules)).changes(Report(original).lock)
    assert {line.rpartition("  ")[0].rpartition("  ")[0] for line in lines if "layers" in line} == {
        "-layers/attn  all-reduce  f32  data",
        "-layers/attn  all-reduce  f32  tensor",
        "+layers/attn  all-reduce  f32  data",
    }
    kept = original.memory.groups["parameters"]
    assert lines[:2] == [f"-memory parameters {kept}", f"+memory parameters {kept + 3 * (32 * 64 + 64 * 32)}"]
    assert all(line[0] in "+-" for line in lines)


def test_what_a_lock_holds(original):
    """A line for each signal, kind, type and axes; none of them contains a source line or a time."""
    header, _, *facts = Report(original).lock.splitlines()
    assert header == "jgt plan lock 1"
    assert facts[:2] == ["target cpu", "mesh data=2 tensor=4"]
    sent = [line.split("  ") for line in facts if "  " in line]
    assert sum(int(row[-1]) for row in sent) == original.sent_bytes
    assert sum(int(row[-2]) for row in sent) == sum(c.count for c in original.collectives)
    assert "test_lock" not in Report(original).lock


def test_comments_and_blank_lines_change_nothing(original):
    assert Report(original).changes(Report(original).lock.replace("\n", "  \n\n# why\n")) == []


@pytest.mark.parametrize("text", ["jgt plan lock 2\n", "", "target cpu\n"])
def test_another_format_is_refused(tmp_path, text):
    path = tmp_path / "plan.lock"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        Report.read_lock(path)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{path}:1: ") and repr(text.strip()) in problem and "'jgt plan lock 1'" in problem


def test_a_lock_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"plan\.lock: cannot be read: .*Write it with --lock"):
        Report.read_lock(tmp_path / "plan.lock")


# ---------------------------------------------------------------------------------------------- budgets


def limits_of(tmp_path, text):
    """The limits of a YAML section, and its problems."""
    path = tmp_path / "budget.yaml"
    path.write_text(text)
    problems = []
    return Budget.read(document.read(path), problems).limits, [p.removeprefix(f"{path}:") for p in problems]


def test_limits_are_read(tmp_path):
    limits, problems = limits_of(tmp_path, "peak_gb: 70\nstep_ms: 1.5\nsent_gb: 0\nlayers/*: {all-gather: 0, all-reduce: 2}\n")
    assert not problems
    assert [(x.key, x.most, x.signal, x.kind) for x in limits] == [
        ("peak_gb", 70, "", ""),
        ("step_ms", 1.5, "", ""),
        ("sent_gb", 0, "", ""),
        ("layers/*.all-gather", 0, "layers/*", "all-gather"),
        ("layers/*.all-reduce", 2, "layers/*", "all-reduce"),
    ]
    assert limits[1].where == f"{tmp_path / 'budget.yaml'}:2"


def test_all_problems_of_a_budget_are_told_with_their_lines(tmp_path):
    limits, problems = limits_of(
        tmp_path,
        "peek_gb: 70\nsent_gb: -1\nstep_ms: fast\nlayers/attn:\n  all-gathers: 0\n  all-reduce: -2\n  all-to-all: true\n"
        "mlp: 3\nhead: {all-gather: .nan}\n",
    )
    assert not limits
    assert [p.partition(":")[0] for p in problems] == ["1", "2", "3", "5", "6", "7", "8", "9"]
    for problem, words in zip(
        problems,
        ["'peak_gb'", "at least 0, not the whole number -1", "'fast'", "'all-gather'", "number -2", "not true", "unknown key", "nan"],
        strict=True,
    ):
        assert words in problem, problem


def test_a_budget_is_a_mapping():
    problems = []
    assert Budget.read(document.Node.of([1, 2], "run.yaml:3", "budget"), problems) == Budget()
    assert problems[0].startswith("run.yaml:3: budget: must be a mapping such as {peak_gb: 70") and problems[0].endswith("not a list")


def limit(key, most, signal="", kind=""):
    """A limit from the first line of a file."""
    return Limit(key=key, where="run.yaml:1", most=most, signal=signal, kind=kind)


def of_signal(most, signal, kind="all-reduce"):
    """A limit on the bytes that a signal sends."""
    return limit(f"{signal}.{kind}", most, signal, kind)


def sent_by(found, signal, kind="all-reduce"):
    """GB that collectives of a kind send under a signal."""
    return sum(c.total_bytes for c in found.collectives if c.signal == signal and c.kind == kind) / 1e9


def test_what_is_within_its_budget(original):
    memory, sent = original.memory.peak_bytes / 1e9, original.sent_bytes / 1e9
    within = (
        limit("peak_gb", memory),
        limit("sent_gb", sent),
        of_signal(sent_by(original, "layers/mlp"), "layers/mlp"),
        of_signal(0, "layers", "all-to-all"),
    )
    assert Budget(limits=within).overruns(original) == []


def test_overruns_name_the_offender(original):
    problems = Budget(limits=(limit("peak_gb", 1e-9), limit("sent_gb", 0), limit("step_ms", 3))).overruns(original)
    largest = max(original.signals, key=lambda row: sum(row.sent.values())).signal
    for problem, key in zip(problems, ["peak_gb", "sent_gb", "step_ms"], strict=True):
        assert problem.startswith(f"run.yaml:1: budget.{key}: ")
    assert "The largest part: parameters" in problems[0] or "The largest part: layers/" in problems[0]
    assert problems[1].endswith(f"The largest part: {largest}")
    assert "a step's time is known only for a target" in problems[2]


def test_a_step_that_takes_too_long_names_the_slowest_signal(original):
    rows = [dataclasses.replace(row, compute_ms=float(n), exposed_ms=0.5) for n, row in enumerate(original.signals)]
    slow = dataclasses.replace(original, step_time_ms=9.0, signals=tuple(rows))
    (problem,) = Budget(limits=(limit("step_ms", 8.5),)).overruns(slow)
    assert "over budget: 9 ms per step, but 8.5 is allowed" in problem and problem.endswith(f"The largest part: {rows[-1].signal}")
    assert Budget(limits=(limit("step_ms", 9.0),)).overruns(slow) == []


def test_a_signals_overrun_names_its_largest_collective(original):
    (problem,) = Budget(limits=(of_signal(0, "layers/mlp"),)).overruns(original)
    worst = next(c for c in original.collectives if c.signal == "layers/mlp")
    assert problem.startswith("run.yaml:1: budget.layers/mlp.all-reduce: ")
    assert (
        f"The largest: all-reduce f32 over {'+'.join(worst.axes)}" in problem
        and problem.endswith(worst.source)
        and "test_lock.py:" in worst.source
    )


@pytest.mark.parametrize("pattern", ["layers", "layers/*", "*", "lay*"])
def test_a_limit_counts_what_is_below_its_signal(original, pattern):
    both = sent_by(original, "layers/attn") + sent_by(original, "layers/mlp")
    assert both > max(sent_by(original, "layers/attn"), sent_by(original, "layers/mlp")) > 0
    assert Budget(limits=(of_signal(both, pattern),)).overruns(original) == []
    assert len(Budget(limits=(of_signal(both - 2e-9, pattern),)).overruns(original)) == 1


def test_a_signal_that_is_not_there_is_told(original):
    (problem,) = Budget(limits=(of_signal(1, "layers/atn"),)).overruns(original)
    assert "the program has no signal 'layers/atn'" in problem and "layers/attn" in problem.partition("'layers/atn'")[2]
    (problem,) = Budget(limits=(of_signal(1, "layers/attn/deeper"),)).overruns(original)
    assert "the program has no signal" in problem
