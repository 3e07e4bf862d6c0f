"""Which modules may import which, checked on the import statements."""

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
            module = imported_module(path.relative_to(ROOT), node)
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def imported_module(path, node):
    """The full name of the module that a statement imports from. The trainer's own imports are relative, and all others absolute."""
    is_own = path.parts[0] == "train"
    if node.level == 0:
        assert not (is_own and node.module.split(".")[0] == "train"), f"{path}: imports of the trainer's own modules are relative"
        return node.module
    assert is_own, f"{path}: imports are absolute"
    package = path.parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def offenders(folder, *forbidden, allowed=()):
    """The files below a folder that import one of these modules or anything inside it."""
    found = []
    for path in modules(folder):
        name = str(path.relative_to(ROOT))
        if name in allowed or any(name.startswith(f"{a}/") for a in allowed):
            continue
        found += [f"{name} imports {i}" for i in sorted(imports(path)) if any(i == f or i.startswith(f"{f}.") for f in forbidden)]
    return found


def test_the_reader_of_imports_sees_them():
    assert {"jax", "jgt.rules", "jgt.rules.Rules"} <= imports(ROOT / "jgt" / "sharding" / "call.py")
    assert offenders("jgt", "jgt.document")
    assert len(modules("jgt")) > 10


ENGINE = [
    "jgt.pipeline",
    "jgt.planner",
    "jgt.hlo",
    "jgt.profile",
    "jgt.sharding",
    "jgt.experts",
    "jgt.regions",
    "jgt.replicas",
    "jgt.partitioner",
    "jgt.verification",
    "jgt.program",
    "jgt.batch",
    "jgt.signal",
]


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("jgt", ["train"]),
        ("jgt", ["flax", "optax", "orbax", "grain"]),
        ("jgt/document", ["jax", "numpy", "jgt.rules", "jgt.mesh", "jgt.schedule", *ENGINE]),
        ("jgt/hardware", ["jax", "numpy", "jgt.rules", "jgt.mesh", "jgt.schedule", *ENGINE]),
        ("jgt/rules", ["jax", "numpy", "jgt.mesh", "jgt.schedule", *ENGINE]),
        ("jgt/mesh", ["jgt.rules", "jgt.schedule", *ENGINE]),
        ("jgt/schedule", ["jax", "jgt.rules", "jgt.mesh", *ENGINE]),
        ("jgt/program", ["jgt.rules", "jgt.mesh", "jgt.schedule", *(room for room in ENGINE if room not in ("jgt.program", "jgt.signal"))]),
        ("jgt/experts", ["jgt.mesh", "jgt.schedule", "jgt.batch", "jgt.pipeline", "jgt.sharding", "jgt.planner", "jgt.hlo", "jgt.profile"]),
        (
            "jgt/regions",
            [
                "jgt.experts",
                "jgt.mesh",
                "jgt.schedule",
                "jgt.batch",
                "jgt.pipeline",
                "jgt.sharding",
                "jgt.planner",
                "jgt.hlo",
                "jgt.profile",
            ],
        ),
        ("jgt/partitioner", ["jgt.rules", "jgt.mesh", "jgt.schedule", *(room for room in ENGINE if room != "jgt.partitioner")]),
        ("jgt/replicas", ["jgt.rules", "jgt.schedule", *(room for room in ENGINE if room not in ("jgt.replicas", "jgt.program"))]),
        ("jgt/batch", ["jgt.rules", "jgt.mesh", "jgt.schedule", "jgt.pipeline", "jgt.sharding", "jgt.planner", "jgt.hlo"]),
        ("jgt/pipeline", ["jgt.rules", "jgt.mesh", "jgt.sharding", "jgt.planner", "jgt.hlo"]),
        ("jgt/hlo", ["jgt.planner", "jgt.pipeline", "jgt.sharding", "jgt.mesh", "jgt.rules"]),
        ("jgt/profile", ["jgt.planner", "jgt.pipeline", "jgt.sharding", "jgt.mesh"]),
        ("train/report", ["jax", "numpy"]),
        ("train/curves", ["jax", "numpy"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_floors_are_kept(folder, forbidden):
    assert offenders(folder, *forbidden) == []


def test_only_two_rooms_ask_whether_a_batch_may_be_cut_and_only_at_the_door():
    assert offenders("jgt", "jgt.batch", allowed=["jgt/batch", "jgt/pipeline", "jgt/sharding/shard.py"]) == []
    rooms = {f"jgt.batch.{path.stem}" for path in modules("jgt/batch") if path.stem != "__init__"}
    assert offenders("jgt", *rooms, allowed=["jgt/batch"]) == []
    assert offenders("train", "jgt.batch") == []


def test_only_commands_open_the_door_to_the_trainer_and_only_when_they_run():
    assert offenders("jgt", "jgt.trainer", allowed=["jgt/command", "jgt/__init__.py"]) == []
    code = """
import sys
import jgt, jgt.__main__, jgt.command.commands, jgt.trainer
jgt.command.commands.find_commands()
assert not {"train", "jgt._train", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def public_names(package):
    """The classes, functions and constants that the files of a package define without an underscore, with their files."""
    found = {}
    for path in modules(package):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append(node.name)
            for name in names:
                if not name.startswith("_") and name not in ("main", "parser"):
                    found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("package", ["jgt", "train"])
def test_no_public_name_is_defined_twice_in_a_package(package):
    found = public_names(package)
    assert len(found) > 100
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


@pytest.mark.parametrize("package", ["jgt", "train"])
def test_no_folder_has_more_modules_than_a_reader_can_hold_in_the_head(package):
    folders = {}
    for path in modules(package):
        if path.name != "__init__.py":
            folders.setdefault(path.parent, []).append(path.name)
    assert {folder.name: len(names) for folder, names in folders.items() if len(names) > 16} == {}
    assert len(folders[ROOT / package]) <= {"jgt": 4, "train": 8}[package]


def test_the_picture_of_the_rooms_is_up_to_date():
    script = ROOT / "docs" / "pictures" / "rooms.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True, cwd=ROOT)


def test_names_need_only_jax():
    found = {i for i in imports(ROOT / "jgt" / "signal.py") if not i.startswith("jgt.experts")}
    assert {i.split(".")[0] for i in found} <= {"__future__", "collections", "contextlib", "importlib", "re", "typing", "jax"}
    subprocess.run([sys.executable, "-c", "import sys, jgt.signal; assert 'jgt.experts' not in sys.modules"], check=True, cwd=ROOT)


def test_only_the_document_reads_yaml():
    assert offenders("jgt", "yaml", allowed=["jgt/document/reader.py"]) == []
    assert offenders("train", "yaml") == []


def test_only_the_checkpoint_knows_orbax():
    assert offenders("train", "orbax", allowed=["train/checkpoint/checkpoint.py", "train/checkpoint/restore.py"]) == []


def test_only_the_data_knows_grain():
    assert offenders("train", "grain", allowed=["train/data"]) == []


def test_only_these_read_packed_files_and_columns():
    assert offenders("train", "pyarrow", allowed=["train/data/columns.py"]) == []
    assert offenders("train", "zstandard", allowed=["train/data/packed.py"]) == []


def test_only_these_draw():
    assert (
        offenders(
            "jgt",
            "rich",
            allowed=["jgt/console.py", "jgt/schedule/timeline.py", "jgt/planner/view/table.py", "jgt/planner/view/compare.py"],
        )
        == []
    )
    assert offenders("train", "rich") == []
    assert offenders("jgt", "matplotlib", allowed=["jgt/schedule/plot.py"]) == []
    assert offenders("train", "matplotlib", allowed=["train/curves/plot.py", "train/search/picture.py"]) == []


def test_models_know_signals_and_nothing_else_of_jgt():
    # Its keys are read like all others; a model does not import them from there.
    for path in modules("train/models"):
        if path.name not in ("config.py", "own.py"):
            ours = {i for i in imports(path) if i.split(".")[0] == "jgt"}
            assert ours <= {"jgt", "jgt.signal", "jgt.signal.context", "jgt.signal.tensor"}, path
            assert "import jgt\n" not in path.read_text(), path


def test_names_of_the_package_and_of_its_modules_do_not_collide():
    code = """
import jgt, types
import jgt.sharding.shard, jgt.planner.plan
from jgt.sharding.shard import place, shard
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
import jgt, jgt.rules, jgt.document, jgt.mesh.sizes, jgt.planner.budget, train.config
jgt.make_rules({"default": "replicate"})
assert "jax" not in sys.modules, "jax was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_report_needs_neither_jax_nor_numpy():
    code = """
import sys
import train.report.__main__, train.report.table, train.curves.__main__
assert not {"jax", "numpy"} & set(sys.modules), "jax or numpy was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
