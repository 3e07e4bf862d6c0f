"""Who may import whom, read from the imports themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def modules(folder):
    return sorted(p for p in (ROOT / folder).rglob("*.py"))


def imports(path):
    """Every module that a file imports, at the top or inside a function, `from a import b` as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def offenders(folder, *forbidden, allowed=()):
    """The files below a folder that import one of these modules or something inside of it."""
    found = []
    for path in modules(folder):
        name = str(path.relative_to(ROOT))
        if name in allowed or any(name.startswith(f"{a}/") for a in allowed):
            continue
        found += [f"{name} imports {i}" for i in sorted(imports(path)) if any(i == f or i.startswith(f"{f}.") for f in forbidden)]
    return found


def test_the_reader_of_imports_sees_them():
    assert {"jax", "jgt.problems", "jgt.rules.Matcher"} <= imports(ROOT / "jgt" / "rewrite.py")
    assert offenders("jgt", "jgt.document")
    assert len(modules("jgt")) > 10


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("jgt", ["train"]),
        ("jgt/rules", ["jax", "jgt.mesh", "jgt.pipeline", "jgt.plan", "jgt.shard", "jgt.rewrite", "jgt.jaxpr", "jgt.signal"]),
        ("jgt/mesh", ["jgt.rules", "jgt.pipeline", "jgt.plan", "jgt.shard", "jgt.rewrite", "jgt.jaxpr", "jgt.signal"]),
        ("jgt/pipeline", ["jgt.rules", "jgt.mesh"]),
        ("jgt", ["flax", "optax", "orbax", "grain"]),
    ],
    ids=["jgt never train", "rules", "mesh", "pipeline", "jgt needs only JAX"],
)
def test_floors_are_kept(folder, forbidden):
    assert offenders(folder, *forbidden) == []


def test_signals_need_only_jax():
    assert {i.split(".")[0] for i in imports(ROOT / "jgt" / "signal.py")} <= {"__future__", "collections", "contextlib", "re", "jax"}


def test_only_the_document_reads_yaml():
    assert offenders("jgt", "yaml", allowed=["jgt/document/reader.py"]) == []
    assert offenders("train", "yaml") == []


def test_only_the_checkpoint_knows_orbax():
    assert offenders("train", "orbax", allowed=["train/checkpoint.py"]) == []


def test_only_the_data_knows_grain():
    assert offenders("train", "grain", allowed=["train/data"]) == []


def test_only_these_draw():
    assert offenders("jgt", "rich", allowed=["jgt/pipeline/timeline.py", "jgt/plan/table.py"]) == []
    assert offenders("train", "rich", allowed=["train/console.py", "train/report/table.py"]) == []
    assert offenders("jgt", "matplotlib", allowed=["jgt/pipeline/plot.py"]) == []
    assert offenders("train", "matplotlib") == []


def test_models_know_signals_and_nothing_else_of_jgt():
    # Its keys are read like all others; a model does not import them from there.
    for path in modules("train/models"):
        if path.name != "config.py":
            ours = {i for i in imports(path) if i.split(".")[0] == "jgt"}
            assert ours <= {"jgt", "jgt.signal", "jgt.signal.context", "jgt.signal.tensor"}, path
            assert "import jgt\n" not in path.read_text(), path


def test_names_of_the_package_and_of_its_modules_do_not_collide():
    code = """
import jgt, types
import jgt.shard, jgt.placement
from jgt.shard import place
from jgt.shard import shard
import jgt.signal
assert jgt.shard is shard and callable(jgt.shard)
assert jgt.place is place
assert isinstance(jgt.signal, types.ModuleType)
for name in jgt.__all__:
    assert name in dir(jgt) and (callable(getattr(jgt, name)) or name == "signal"), name
try:
    jgt.shards
except AttributeError as error:
    assert "has no attribute 'shards'" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_typo_is_answered_without_jax():
    code = """
import sys
import jgt, jgt.rules, jgt.document, jgt.mesh.sizes, jgt.problems, train.config
jgt.make_rules({"default": "replicate"})
assert "jax" not in sys.modules, "jax was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_report_needs_neither_jax_nor_numpy():
    code = """
import sys
import train.report.__main__, train.report.table
assert not {"jax", "numpy"} & set(sys.modules), "jax or numpy was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
