"""The config of a run: it can be printed and read back, and finds its rules and its directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from train.__main__ import main
from train.config import load
from train.settings.sections import RunConfig


def resolved(capsys, path, *overrides):
    assert main(["--config", str(path), *overrides, "--print-config"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.kind=gpt", "train.remat=[heads, hidden]", "optimizer.clip=null", "optimizer.eps=1e-12", "sample.prompt='a: \"1e5\"\\n#'"),
        ("run.name='1e5'", "train.remat=block", "data={source: mixture, mixture: [{weight: 2}, {weight: 1, source: text, path: LICENSE}]}"),
    ],
)
def test_the_printed_config_is_that_config(tmp_path, root, capsys, monkeypatch, overrides):
    monkeypatch.chdir(root)
    quickstart = Path("configs/quickstart.yaml")
    text = resolved(capsys, quickstart, *overrides)
    # Written to another folder: it must not need the rules file any more.
    (tmp_path / "printed.yaml").write_text(text)
    run, again = load(quickstart, overrides), load(tmp_path / "printed.yaml")
    sections = [{k: v for k, v in vars(r.config).items() if k not in ("mesh", "rules")} for r in (run, again)]
    assert sections[0] == sections[1]
    assert run.mesh == again.mesh
    assert run.rules == again.rules is not None
    assert resolved(capsys, tmp_path / "printed.yaml") == text


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[3] / "configs" / "rules").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_rules_file_is_printed_whole(tmp_path, capsys, path):
    (tmp_path / "run.yaml").write_text("mesh: {data: -1, replica: 1, fsdp: 1, stage: 1, tensor: 1, expert: 1, seq: 1}")
    (tmp_path / "printed.yaml").write_text(resolved(capsys, tmp_path / "run.yaml", f"rules={path}"))
    rules = load(tmp_path / "run.yaml", [f"rules={path}"]).rules
    assert rules == load(tmp_path / "printed.yaml").rules is not None


def test_without_rules(tmp_path):
    (tmp_path / "run.yaml").write_text("train: {steps: 3}")
    run = load(tmp_path / "run.yaml")
    assert run.rules_root is None
    assert run.batch_dims == (("data",), ())
    assert run.resolved()["rules"] is None


def test_rules_stand_beside_the_file(tmp_path):
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "r.yaml").write_text("default: replicate")
    (tmp_path / "run.yaml").write_text("mesh: {data: -1}\nrules: rules/r.yaml")
    assert load(tmp_path / "run.yaml").rules.default == "replicate"


def test_the_directory_has_the_name_unless_it_is_given():
    assert RunConfig(name="a").path == Path("runs/a")
    assert RunConfig(name="a", dir="b/c").path == Path("b/c")


def test_an_override_says_where_it_stands(tmp_path):
    (tmp_path / "run.yaml").write_text("run:\n  seed: 1\ntrain:\n  steps: 3\n")
    run = load(tmp_path / "run.yaml", ["train.steps=4"])
    assert run.config.train.steps == 4
    assert run.where("run.seed") == f"{tmp_path}/run.yaml:2"
    assert run.where("run.name") == f"{tmp_path}/run.yaml:1"
    assert run.where("train.steps") == "command line: train.steps=4"


def test_the_command_answers_bad_input_with_exit_code_2(tmp_path, root):
    (tmp_path / "run.yaml").write_text("train: {step: 3}")
    done = subprocess.run([sys.executable, "-m", "train", "--config", str(tmp_path / "run.yaml")], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{tmp_path}/run.yaml:1: train.step: unknown key. Did you mean 'steps'?\n"
