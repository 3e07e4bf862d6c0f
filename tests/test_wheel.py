"""The wheel and the sdist are complete: installed in a fresh environment, in an empty folder with a `train.py`, jgt trains."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "runs", "results")
FILES = [path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*") if path.is_file()]
SHIPPED = sorted(str(path) for path in FILES if "__pycache__" not in path.parts)

pytestmark = pytest.mark.slow


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The folder with the programs of a fresh environment that has the packages of this one, but not its jgt."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", str(folder), cwd=folder)
    asked = [str(folder / "bin" / "pip"), "install", "-q", "build", "setuptools>=77", "wheel"]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
    site = Path(run(str(folder / "bin" / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A path alone: the .pth files there, one of which may be that of an editable jgt, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.fixture(scope="module")
def built(environment, tmp_path_factory):
    """The folder with the sdist, and the wheel that is built from it."""
    source, out = tmp_path_factory.mktemp("source") / "jgt", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    run(str(environment / "python"), "-m", "build", "--no-isolation", "--outdir", str(out), cwd=source)
    return out


def test_the_wheel_has_every_shipped_file(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"jgt/{name}" for name in SHIPPED} <= set(names)
    sources = {str(path.relative_to(ROOT)) for package in ("jgt", "train") for path in (ROOT / package).rglob("*.py")}
    assert sources <= set(names)
    assert "jgt/py.typed" in names and "jgt/planner/hardware/chips/h100.yaml" in names and "jgt/planner/view/page.html" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"jgt", "train"}


def test_the_sdist_has_docs_tests_and_benchmarks(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    folders = [ROOT / name for name in ("docs", "tests", "configs", "deploy", "jgt", "train")]
    wanted = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name and "/." not in name}
    assert wanted <= names, sorted(wanted - names)
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "benchmarks/step.py", "setup.py", "pyproject.toml"} <= names
    assert not any(name.endswith(".pyc") for name in names)


def users_file(folder):
    (folder / "train.py").write_text("raise SystemExit('the train.py of the user ran')")


def users_package(folder):
    (folder / "train").mkdir()
    for name in ("__init__.py", "__main__.py", "config.py"):
        (folder / "train" / name).write_text("raise SystemExit('the train package of the user ran')")


def users_data(folder):
    # Python finds it as a package without __init__.py.
    (folder / "train").mkdir()
    (folder / "train" / "0001.txt").write_text("data of the user")


SMALL = ["train.steps=2", "train.batch=8", "train.eval_every=0", "checkpoint.every=2", "sample.tokens=0"]


@pytest.fixture(scope="module")
def installed(environment, built):
    """The folder with the programs of the environment, in which the wheel is installed."""
    (wheel,) = built.glob("*.whl")
    run(str(environment / "pip"), "install", "-q", "--no-deps", "--no-index", str(wheel), cwd=environment)
    return environment


@pytest.mark.parametrize("write", [users_file, users_package, users_data])
def test_a_new_project_trains_beside_a_train_of_the_user(installed, tmp_path, write):
    write(tmp_path)
    (tmp_path / "text.txt").write_text(" ".join(str(i * i) for i in range(4000)))
    small = [*SMALL, "model.depth=1", "model.width=32", "model.seq=32", "data.source=text", f"data.path={tmp_path}/text.txt"]
    run(str(installed / "jgt"), "init", "x", cwd=tmp_path)
    run(str(installed / "jgt"), "train", "x/run.yaml", "--code", "x/model.py", *small, "data.eval_tokens=0", cwd=tmp_path)
    assert (tmp_path / "runs" / "x" / "metrics.jsonl").read_text().count('"loss"') == 2
    run(str(installed / "python"), "-m", "jgt", "check", "x/run.yaml", "--code", "x/model.py", "--devices", "8", cwd=tmp_path)


def test_the_wheel_trains_beside_a_train_of_the_user(installed, tmp_path):
    environment = installed
    users_file(tmp_path)
    (tmp_path / "text.txt").write_text(" ".join(str(i * i) for i in range(4000)))
    jgt = str(environment / "jgt")
    where = run(str(environment / "python"), "-c", "import jgt; print(jgt.__file__)", cwd=tmp_path)
    assert str(environment.parent) in where
    small = ["model.layers=1", "model.embed=32", "model.ffn=64", "model.seq=32", "train.steps=2", "train.batch=8", "sample.tokens=0"]
    data = ["data.source=text", "data.path=text.txt", "data.eval_tokens=0"]
    for program in ([jgt], [str(environment / "python"), "-m", "jgt"]):
        assert "jgt 0." in run(*program, "--version", cwd=tmp_path)
        run(*program, "check", "jgt:quickstart", "rules=jgt:fsdp", "mesh={fsdp: -1}", cwd=tmp_path)
    run(jgt, "init", "x", cwd=tmp_path)
    run(jgt, "schema", "--write", "schemas", cwd=tmp_path)
    for name in ("run.json", "rules.json"):
        assert (tmp_path / "schemas" / name).read_text() == (tmp_path / "x" / "schema" / name).read_text()
    run(jgt, "train", "jgt:quickstart", *small, *data, cwd=tmp_path)
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text().count('"loss"') == 2
    run(jgt, "report", "runs/quickstart", cwd=tmp_path)
