"""jgt finds its trainer under whatever name is free, once in a process, and never runs a `train` of the user's."""

import subprocess
import sys
from pathlib import Path

import pytest

import train
from jgt.command.trainer import trainer

ROOT = Path(__file__).parent.parent.parent
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
USERS = {
    "nothing": {},
    "file": {"train.py": "raise SystemExit('the train.py of the user ran')"},
    "package": {"train/__init__.py": "raise SystemExit('the package of the user ran')", "train/__main__.py": ""},
    "folder": {"train/data.txt": ""},
    "file that imports jgt": {
        "train.py": "import jgt, jgt.command.trainer\njgt.command.trainer.trainer('config')\nraise SystemExit('ran')"
    },
}


@pytest.fixture(params=USERS)
def folder(request, tmp_path):
    """A working directory of a user, with a `train` of every kind."""
    for name, text in USERS[request.param].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def python(folder, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    )


def test_the_package_that_is_loaded_already():
    assert trainer() is train
    assert trainer("config") is train.config
    with pytest.raises(ModuleNotFoundError):
        trainer("nothing_of_the_kind")


def test_a_jgt_without_its_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr("jgt.command.trainer._FOLDER", tmp_path / "train")
    with pytest.raises(ImportError, match=r"the trainer is missing: .* Install jgt again"):
        trainer("config")


def test_jgt_train_in_a_folder_of_a_user(folder):
    done = python(folder, "-m", "jgt", "train", CONFIG, "--print-config")
    assert (done.returncode, done.stderr) == (0, "")
    assert "name: quickstart" in done.stdout


CODE = """
import sys
from jgt.command.trainer import trainer
before = sorted(name for name in sys.modules if name.split(".")[0] == "train")
config = trainer("config")
assert config.Config is trainer("config").Config
# Both names at once would be two copies.
ours = {name for name, module in sys.modules.items() if getattr(module, "__file__", None) == config.__file__}
assert len(ours) == 1, ours
assert "jax" not in sys.modules
print(config.__name__)
"""


def test_the_name_of_the_trainer(folder):
    done = python(folder, "-c", CODE)
    assert done.returncode == 0, done.stderr
    is_free = not any("__init__" in path.name or path.name == "train.py" for path in folder.rglob("*"))
    assert done.stdout.strip() == ("train.config" if is_free else "jgt._train.config")


def test_a_train_of_the_user_that_is_imported_first(tmp_path):
    (tmp_path / "train.py").write_text("from jgt.command.trainer import trainer\nname = trainer('config').__name__\n")
    done = python(
        tmp_path,
        "-c",
        "import train; assert train.name == 'jgt._train.config'; from jgt.command.trainer import trainer; trainer('settings.sections')",
    )
    assert done.returncode == 0, done.stderr
    done = python(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr


def test_a_user_still_imports_the_own_train(tmp_path):
    (tmp_path / "train.py").write_text("answer = 42\n")
    done = python(tmp_path, "-c", "from jgt.command.trainer import trainer; trainer('config'); import train; assert train.answer == 42")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [["train"], ["launch", "--processes", "2", "--"]], ids=lambda command: command[0])
def test_a_whole_run_beside_a_train_of_the_user(command, tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('the train.py of the user ran')")
    (tmp_path / "text.txt").write_text(" ".join(str(i * i) for i in range(4000)))
    (tmp_path / "run.yaml").write_text(
        "model: {layers: 1, embed: 32, heads: 4, kv_heads: 4, ffn: 64, vocab: 256, seq: 32}\n"
        "devices: {virtual_cpu: 1}\nmesh: {data: -1}\nrules: {axes: {batch: [data]}, default: replicate}\n"
        "data: {source: text, path: text.txt, eval_tokens: 0}\ntrain: {steps: 2, batch: 4}\n"
    )
    done = python(tmp_path, "-m", "jgt", *command, "run.yaml")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().count("\n") == 2
    done = python(tmp_path, "-m", "jgt", "report", "runs/run", "--json")
    assert done.returncode == 0, done.stderr
