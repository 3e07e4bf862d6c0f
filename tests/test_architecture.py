"""Which modules may import which, checked on import statements and on strings that load a module."""

import ast
import dataclasses
import functools
import importlib.util
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from train.config.config import Config

ROOT = Path(__file__).parent.parent


PICTURE = ROOT / "docs" / "pictures" / "rooms.py"
spec = importlib.util.spec_from_file_location("rooms", PICTURE)
rooms = importlib.util.module_from_spec(spec)
sys.modules["rooms"] = rooms
spec.loader.exec_module(rooms)


@pytest.fixture(scope="module", autouse=True)
def forget_trees():
    """Trees of the whole repository are half a million objects, which would slow down the garbage collector in the tests that follow."""
    yield
    rooms.tree_of.cache_clear()


def modules(folder):
    return sorted(p for p in (ROOT / folder).rglob("*.py"))


@functools.cache
def imports(path):
    """Every module that a file imports, at the top or inside a function, by statements and by strings."""
    for node in ast.walk(rooms.tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            check_style(path.relative_to(ROOT), node)
    return rooms.modules_of(path)


def check_style(path, node):
    """The trainer's own imports are relative, and all others absolute."""
    is_own = path.parts[0] == "train"
    if node.level == 0:
        assert not (is_own and node.module.split(".")[0] == "train"), f"{path}: imports of the trainer's own modules are relative"
    else:
        assert is_own, f"{path}: imports are absolute"


def offenders(folder, *forbidden, allowed=()):
    """The files below a folder that import one of these modules, other than their own, or anything inside it."""
    forbidden = [name for name in forbidden if name != folder.replace("/", ".")]
    found = []
    for path in modules(folder):
        name = str(path.relative_to(ROOT))
        if name in allowed or any(name.startswith(f"{a}/") for a in allowed):
            continue
        found += [f"{name} imports {i}" for i in sorted(imports(path)) if any(i == f or i.startswith(f"{f}.") for f in forbidden)]
    return found


def test_the_reader_of_imports_sees_them(tmp_path, monkeypatch):
    assert {"jax", "jgt.rules", "jgt.rules.Rules"} <= imports(ROOT / "jgt" / "sharding" / "call.py")
    assert "train.run.api" in imports(ROOT / "jgt" / "command" / "trainer.py")
    path = tmp_path / "train" / "a" / "b.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "importlib.import_module('jgt.c')\n"
        "importlib.import_module('..d', __package__)\n"
        "subprocess.run([sys.executable, '-m', 'jgt.e'])\n"
        "subprocess.run([sys.executable, '-c', \"from jgt import f; trainer('g.h').main()\"])\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(rooms, "ROOT", tmp_path)
        assert rooms.modules_of(path) == {"jgt.c", "train.d", "jgt.e", "jgt", "jgt.f", "train.g.h"}
    assert offenders("jgt", "jgt.document")
    assert len(modules("jgt")) > 10


ENGINE = [
    "jgt.pipeline",
    "jgt.planner",
    "jgt.sharding",
    "jgt.api",
    "jgt.replacements",
    "jgt.program",
    "jgt.signal",
]
ABOVE = [room for room in ENGINE if room not in ("jgt.planner", "jgt.program")]
"""The rooms that the readers of compiled programs do not know. They know nothing of a plan either."""
PLANNER = [f"jgt.planner.{path.stem}" for path in (ROOT / "jgt" / "planner").glob("*.py") if path.stem != "__init__"]
TRUNK = sorted(rooms.rooms_of("train").keys() - set(rooms.WINGS))
ROOMS_OF_TRAIN = [f"train.{room}" for room in (*TRUNK, *rooms.WINGS)]
SHARDING = ("jgt.sharding", "jgt.replacements", "jgt.program")


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("jgt", ["flax", "optax", "orbax", "grain"]),
        ("jgt/document", ["jax", "numpy", "jgt.rules", "jgt.mesh", "jgt.schedule", *ENGINE]),
        ("jgt/planner/hardware", ["jax", "numpy", "jgt.rules", "jgt.mesh", "jgt.schedule", *ABOVE]),
        ("jgt/rules", ["jax", "numpy", "jgt.mesh", "jgt.schedule", *ENGINE]),
        ("jgt/mesh", ["jgt.rules", "jgt.schedule", *ENGINE]),
        ("jgt/schedule", ["jax", "jgt.rules", "jgt.mesh", *ENGINE]),
        ("jgt/program", ["jgt.rules", "jgt.mesh", "jgt.schedule", *(room for room in ENGINE if room != "jgt.program")]),
        ("jgt/replacements", ["jgt.mesh", "jgt.schedule", *(room for room in ENGINE if room not in ("jgt.replacements", "jgt.program"))]),
        ("jgt/sharding", ["jgt.mesh", "jgt.schedule", "jgt.replacements.experts", *(room for room in ENGINE if room not in SHARDING)]),
        ("jgt/sharding/partitioner", ["jgt.rules", "jgt.mesh", "jgt.schedule", *(room for room in ENGINE if room != "jgt.sharding")]),
        ("jgt/pipeline/batch", ["jgt.schedule", *(f"jgt.pipeline.{path.stem}" for path in (ROOT / "jgt" / "pipeline").glob("*.py"))]),
        ("jgt/pipeline", ["jgt.mesh", "jgt.planner"]),
        ("jgt/planner/hlo", ["jgt.rules", "jgt.mesh", "jgt.schedule", *ABOVE, *PLANNER]),
        ("jgt/planner/profile", ["jgt.rules", "jgt.mesh", "jgt.schedule", *ABOVE, *PLANNER]),
        ("train/watch", ["jax", "numpy"]),
        ("train/files", ["jax", "numpy", *ROOMS_OF_TRAIN]),
        ("train/settings", ["jax", "numpy", *(room for room in ROOMS_OF_TRAIN if room != "train.files")]),
        ("train/journal", ["jax", "numpy", *(room for room in ROOMS_OF_TRAIN if room not in ("train.files", "train.settings"))]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_floors_are_kept(folder, forbidden):
    assert offenders(folder, *forbidden) == []


def test_the_trunk_knows_no_wing():
    wings = [f"train.{wing}" for wing in rooms.WINGS]
    assert offenders("train", *wings, allowed=[f"train/{wing}" for wing in rooms.WINGS]) == []
    for wing in rooms.WINGS:
        others = [name for name in wings if name != f"train.{wing}"]
        assert offenders(f"train/{wing}", *others) == []
        assert f'place=".{wing}.' in (ROOT / "jgt" / "command" / "commands.py").read_text()
    arrows = sum(len(room.imports) for name, room in rooms.rooms_of("train").items() if name in TRUNK)
    assert len(TRUNK) <= 20 and arrows <= 95, (len(TRUNK), arrows)


def test_what_runs_a_pipeline_knows_no_rules():
    staging = [f"jgt/pipeline/{name}.py" for name in ("staging", "microbatches", "chunks")]
    assert offenders("jgt/pipeline", "jgt.rules", "jgt.sharding", allowed=staging) == []


def test_other_replacements_know_no_experts():
    assert offenders("jgt/replacements", "jgt.replacements.experts", allowed=["jgt/replacements/experts"]) == []


def test_only_the_pipeline_asks_whether_a_batch_may_be_cut_and_only_at_the_door():
    assert offenders("jgt", "jgt.pipeline.batch", allowed=["jgt/pipeline"]) == []
    files = {f"jgt.pipeline.batch.{path.stem}" for path in modules("jgt/pipeline/batch") if path.stem != "__init__"}
    assert offenders("jgt", *files, allowed=["jgt/pipeline/batch"]) == []
    assert offenders("train", "jgt.pipeline.batch") == []


def test_only_commands_open_the_door_to_the_trainer_and_only_when_they_run():
    assert offenders("jgt", "train", allowed=["jgt/command/trainer.py"]) == []
    assert offenders("jgt", "jgt.command.trainer", allowed=["jgt/command", "jgt/__init__.py"]) == []
    code = """
import sys
import jgt, jgt.__main__, jgt.command.commands, jgt.command.trainer
jgt.command.commands.find_commands()
assert not {"train", "jgt._train", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def constants(path):
    """The strings of a file that are not docstrings."""
    tree = rooms.tree_of(path)
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and n not in prose]


def test_the_planner_names_no_key_no_axis_and_no_signal_of_the_trainer():
    sections = {f.name: f.type for f in dataclasses.fields(Config)}
    assert {"train", "model", "optimizer"} <= sections.keys()
    key = re.compile(rf"\b({'|'.join(sections)})\.(?!yaml)[a-z_]+\b|\btrain[./]")
    names = {"data", "fsdp", "tensor", "stage", "replica", "expert", "embed", "head", "layers", "attn", "mlp"}
    for path in modules("jgt/planner"):
        for text in constants(path):
            assert not key.search(text) and text not in names, (path, text)
    # A document shows examples of keys, and commands load the trainer.
    for path in modules("jgt"):
        if path.parts[-2] not in ("document", "command") and path.name != "trainer.py":
            assert not re.search(r"\btrain[./][a-z]", path.read_text()), path


def test_only_the_command_table_names_the_search_for_wrong_programs():
    assert offenders("jgt", "jgt.conformance", allowed=["jgt/conformance", "jgt/command/commands.py"]) == []
    assert offenders("train", "jgt.conformance") == []


DOORS = ("jgt", "jgt.document", "jgt.planner", "jgt.signal")


def names_of_jgt(path):
    """The names of jgt that a file uses, each with the module that it takes it from."""
    tree, doors = rooms.tree_of(path), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            doors |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name.split(".")[0] == "jgt"}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.split(".")[0] == "jgt":
            for alias in node.names:
                if f"{node.module}.{alias.name}" in DOORS:
                    doors[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    yield node.module, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in doors:
            yield doors[node.value.id], node.attr


def test_the_trainer_enters_jgt_by_its_doors_and_uses_few_names():
    used = {found for path in modules("train") for found in names_of_jgt(path)}
    assert {module for module, _ in used} == set(DOORS)
    # Of a chip, whose figures the wing of plans measures, the trainer knows three.
    assert len(used) <= 58, sorted(used)


def public_names(package):
    """The classes, functions and constants that the files of a package define without an underscore, with their files."""
    found = {}
    for path in modules(package):
        for node in rooms.tree_of(path).body:
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


def test_the_picture_of_the_rooms_is_up_to_date(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(PICTURE), "--check"])
    assert rooms.main() == 0


def module_of(path):
    """The name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files_by_module():
    """The files of all modules but jgt itself, whose names are loaded on first use (PEP 562)."""
    return {name: path for package in ("jgt", "train") for path in modules(package) if (name := module_of(path)) != "jgt"}


def imported_files(path, files):
    """The files that a file imports. `from a import b` is about the file of b if there is one, and about that of a if not."""
    found = imports(path) - {module_of(path)}
    return {files[name] for name in found if name in files and not any(other.startswith(f"{name}.") and other in files for other in found)}


def test_no_file_imports_itself_through_others():
    files = files_by_module()
    list(TopologicalSorter({path: imported_files(path, files) for path in files.values()}).static_order())


def closure(path, files):
    """A file with all files that are loaded with it: what it imports, and the `__init__` of each folder around."""
    found, waiting = set(), [path]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        around = [folder / "__init__.py" for folder in path.parents if folder not in (ROOT, ROOT / "jgt") and ROOT in folder.parents]
        waiting += [file for file in (*around, *imported_files(path, files)) if file not in found]
    return found


def lines_in(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_a_sharded_call_loads_neither_pipelines_nor_a_planner():
    owner = re.search(r'"([\w.]+)": \([^)]*"shard"', (ROOT / "jgt" / "__init__.py").read_text())[1]
    files = files_by_module()
    loaded = closure(files[owner], files) | {ROOT / "jgt" / "__init__.py"} | closure(ROOT / "jgt" / "mesh" / "nvidia.py", files)
    rooms_loaded = {path.relative_to(ROOT).parts[1] for path in loaded}
    assert not {"pipeline", "schedule", "planner"} & rooms_loaded
    assert ROOT / "jgt" / "api" / "verify.py" not in loaded
    assert ROOT / "jgt" / "sharding" / "partitioner" / "avoid.py" in loaded


def loaded_by(code):
    """The files of jgt that a fresh process has loaded after this code."""
    code += "\nprint(*sorted(m.__file__ for m in list(sys.modules.values()) if getattr(m, '__name__', '').split('.')[0] == 'jgt'))"
    printed = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    return {Path(name) for name in printed.split()}


CALL = """
import jax, jgt
from jgt import signal
def loss(p, x):
    with signal.context("mlp"):
        return (x @ p["w"]).sum()
rules = {rules}
sharded = jgt.shard(loss, rules, jgt.make_mesh({{"data": 1}}, devices=jax.devices()[:1]))
jax.jit(jax.grad(sharded))({{"w": jax.numpy.ones((2, 2))}}, jax.numpy.ones((2, 2)))
"""


def test_a_call_loads_what_its_rules_and_its_program_ask_for():
    batch = {"axes": {"batch": ["data"]}, "inputs": {"**": ["batch", None]}, "default": "replicate"}
    plain = loaded_by(CALL.format(rules=batch | {"signals": {"mlp": {"params": {"w": [None, "data"]}}}}))
    replacements = ROOT / "jgt" / "replacements"
    assert {path for path in plain if replacements in path.parents} == {replacements / "__init__.py", replacements / "replacement.py"}
    assert not {ROOT / "jgt" / "api" / "verify.py", ROOT / "jgt" / "document" / "reader.py"} & plain
    assert ROOT / "jgt" / "sharding" / "partitioner" / "avoid.py" in plain
    assert lines_in(plain) <= 6_450


def test_signals_load_experts_only_for_a_model_that_calls_them():
    loaded = loaded_by("from jgt import signal\nwith signal.context('mlp'): pass")
    assert lines_in(loaded) <= 400
    assert {path.relative_to(ROOT).parts[1] for path in loaded} == {"__init__.py", "signal.py", "mesh", "program"}
    assert ROOT / "jgt" / "replacements" / "experts" / "call.py" in loaded_by("from jgt import signal\nsignal.experts")


def test_the_code_that_shards_can_be_read_in_an_afternoon():
    (paragraph,) = re.findall(r"To review only the code that chooses\n(.+?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    named = [ROOT / name for name in re.findall(r"`(jgt/[\w/.]+)`", paragraph)]
    files = {file for path in named for file in ([path] if path.suffix else path.glob("*.py"))}
    without = {named[-1] / name for name in re.findall(r"`(\w+\.py)`", paragraph)}
    assert without < files
    count = lines_in(files - without)
    avoided = lines_in((ROOT / "jgt" / "sharding" / "partitioner").glob("*.py"))
    assert count <= 4_325
    assert avoided <= 1_500
    assert f"about {round(count, -2):,} lines, comments included. About {round(avoided, -2):,} more" in " ".join(paragraph.split())


def test_signals_need_only_jax_and_what_a_call_of_experts_is():
    loaded = closure(ROOT / "jgt" / "signal.py", files_by_module())
    assert {module_of(path).split(".")[1] for path in loaded} == {"signal", "replacements", "program"}
    scopes = imports(ROOT / "jgt" / "program" / "scopes.py")
    assert not {i for i in scopes if i.split(".")[0] == "jgt"}


HLO = ("custom_call_target", "op_name=", "metadata={", "operand_layout_constraints", "replica_groups", "__cudnn$", "HloModule")
"""Marks of the text of a compiled program."""


def test_one_room_reads_the_text_of_compiled_programs():
    # Without the backslashes of patterns.
    texts = {path: "\n".join(constants(path)).replace("\\", "") for room in ("jgt", "train") for path in modules(room)}
    readers = {path for path, text in texts.items() if any(mark in text for mark in HLO)}
    assert readers and {path.parent for path in readers} == {ROOT / "jgt" / "planner" / "hlo"}


def test_only_the_document_reads_yaml():
    assert offenders("jgt", "yaml", allowed=["jgt/document/reader.py"]) == []
    assert offenders("train", "yaml") == []


def test_one_file_reads_checkpoints_without_orbax_and_one_knows_stores():
    assert offenders("train", "tensorstore", allowed=["train/checkpoint/pieces.py", "train/files/bucket.py"]) == []


def test_only_the_checkpoint_knows_orbax():
    assert offenders("train", "orbax", allowed=["train/checkpoint/files.py", "train/checkpoint/restore.py"]) == []


def called(path):
    """The calls in a file: `json.loads` for a function of a module, and `.rename(x)` for a method of one argument."""
    for node in ast.walk(rooms.tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if isinstance(node.func.value, ast.Name):
                yield f"{node.func.value.id}.{node.func.attr}"
            if len(node.args) == 1 and not node.keywords:
                yield f".{node.func.attr}(x)"


OWNERS = [
    # Others parse what this process or its own child has written a moment before, and never a file of someone else.
    ("json.loads", "files/json_text.py", "checkpoint/manifest.py", "commands/evaluate.py", "data/own/shard.py", "export/form.py"),
    ("json.loads", "files/json_text.py", "data/chat/sandbox.py", "data/chat/template.py", "processes/processes.py"),
    ("json.loads", "files/json_text.py", "doctor/devices.py", "doctor/worker.py"),
    # A line of a connection, whose reader refuses any error; and files of a run directory that the same start has just checked.
    ("json.loads", "files/json_text.py", "processes/join.py", "run/directory/history.py", "run/directory/identity.py"),
    ("fcntl.flock", "files/locks.py"),
    # A sealed file and encoded text have temporary names of their own: the file's may be as long as names can be, or is not known yet.
    (".replace(x)", "files/disk.py", "files/sealed.py", "data/encoded.py"),
    # A tick that repeats is a Worker. These wait for news or for rows, or do one thing and end.
    ("threading.Thread", "files/worker.py", "files/lease.py", "files/mirror.py", "files/streams.py", "records/services.py"),
    ("threading.Thread", "files/worker.py", "run/hooks/alerts.py", "verify/child.py", "verify/limits.py", "commands/serve/engine.py"),
    ("threading.Thread", "files/worker.py", "watch/exporter/endpoint.py"),
    ("threading.Thread", "files/worker.py", "processes/peers.py", "processes/processes.py", "processes/watch.py"),
    # Folders, and files that are put aside.
    (".rename(x)", "files/disk.py", "files/cache.py", "checkpoint/steps.py", "evaluate/answers.py", "export/exports.py"),
    (".rename(x)", "files/disk.py", "run/directory/folder.py", "run/directory/history.py", "weights/origin.py", "weights/writing.py"),
    (".rename(x)", "files/disk.py", "records/profiler.py"),
]


def test_one_file_owns_each_mechanism():
    for call in {row[0] for row in OWNERS}:
        allowed = {f"train/{name}" for row in OWNERS if row[0] == call for name in row[1:]}
        users = {str(path.relative_to(ROOT)) for path in modules("train") if call in called(path)}
        assert users <= allowed, (call, users - allowed)
    users = [path for path in modules("train") if any(text == "XDG_CACHE_HOME" for text in constants(path))]
    assert users == [ROOT / "train" / "files" / "disk.py"]


def test_only_the_data_knows_grain():
    assert offenders("train", "grain", allowed=["train/data"]) == []


def test_only_these_read_packed_files_and_columns():
    assert offenders("train", "pyarrow", allowed=["train/data/columns.py"]) == []
    assert offenders("train", "zstandard", allowed=["train/data/packed.py"]) == []


def test_only_the_harness_is_about_lm_eval():
    assert offenders("train", "lm_eval", allowed=["train/evaluate/harness.py"]) == []


def test_only_these_serve_and_write_by_templates():
    assert offenders("train", "starlette", allowed=["train/commands/serve/app.py"]) == []
    assert offenders("train", "uvicorn", allowed=["train/commands/serve/server.py"]) == []
    assert offenders("train", "jinja2", allowed=["train/data/chat/sandbox.py"]) == []


def test_only_these_draw():
    assert (
        offenders(
            "jgt",
            "rich",
            allowed=["jgt/command/console.py", "jgt/schedule/timeline.py", "jgt/planner/view/table.py", "jgt/planner/view/compare.py"],
        )
        == []
    )
    assert offenders("train", "rich") == []
    assert offenders("jgt", "matplotlib") == []
    assert offenders("train", "matplotlib", allowed=["train/watch/plot.py", "train/plan/picture.py"]) == []


def test_models_know_signals_and_nothing_else_of_jgt():
    # Its keys are read like all others; a model does not import them from there.
    for path in modules("train/models"):
        if path.name not in ("config.py", "options.py", "own.py"):
            ours = {i for i in imports(path) if i.split(".")[0] == "jgt"}
            assert ours <= {"jgt", "jgt.signal", "jgt.signal.context", "jgt.signal.tensor"}, path
            assert "import jgt\n" not in path.read_text(), path


def test_names_of_the_package_and_of_its_modules_do_not_collide():
    code = """
import jgt, types
import jgt.api.shard, jgt.planner.plan
from jgt.api.shard import place, shard
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
import train.watch.__main__
assert not {"jax", "numpy"} & set(sys.modules), "jax or numpy was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
