"""`jgt:NAME` is the same file wherever a command runs, in a checkout as in an installed package."""

from pathlib import Path

import pytest

import jgt
from jgt.document import InputError, files
from train.config import load

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
RULES = sorted(path.stem for path in (CONFIGS / "rules").glob("*.yaml"))


def test_a_path_is_left_alone():
    assert files.locate("runs/a.yaml") == Path("runs/a.yaml")


def test_a_package_with_configs_inside_reads_those(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PACKAGE", tmp_path / "jgt")
    assert files.locate("jgt:a") == tmp_path / "configs" / "a.yaml"
    (tmp_path / "jgt" / "configs").mkdir(parents=True)
    assert files.locate("jgt:a", "rules") == tmp_path / "jgt" / "configs" / "rules" / "a.yaml"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(f"jgt:{name}").resolved() == load(CONFIGS / f"{name}.yaml").resolved()


@pytest.mark.parametrize("name", RULES)
def test_rules_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = jgt.load_rules(CONFIGS / "rules" / f"{name}.yaml")
    assert jgt.load_rules(f"jgt:{name}") == expected
    (tmp_path / "own.yaml").write_text(f"extends: jgt:rules/{name}\n")
    assert jgt.load_rules("own.yaml") == expected
    (tmp_path / "run.yaml").write_text(
        f"mesh: {{replica: 1, data: 1, fsdp: 1, stage: 1, tensor: 1, expert: 1, seq: 1}}\nrules: jgt:{name}\n"
    )
    assert load("run.yaml").rules == expected


def test_a_name_that_is_not_shipped(tmp_path):
    with pytest.raises(InputError, match=r"quickstrat.yaml: cannot be read: .* Did you mean 'quickstart.yaml'\?"):
        load("jgt:quickstrat")
    with pytest.raises(InputError, match=r"rules: no such file: .*/fspd.yaml. Did you mean 'fsdp.yaml'\?"):
        load("jgt:quickstart", ["rules=jgt:fspd"])
