"""The documentation is true: examples run, messages match the code, and keys, defaults and files exist."""

import dataclasses
import inspect
import itertools
import json
import re
import shlex
import typing
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jgt
from jgt import document
from jgt.__main__ import main as jgt_main
from jgt.command.commands import find_commands
from jgt.document.keys import keys_of
from jgt.mesh import sizes
from jgt.planner.budget import Budget
from jgt.planner.findings import FindingKind
from jgt.planner.hardware.chip import chip_names
from jgt.planner.hlo.collectives import Collective
from jgt.rules import Action, BackwardRule, SignalRule, axes
from jgt.rules.load import RulesFile
from jgt.schedule import custom, schedules
from jgt.schedule.__main__ import parser as schedule_parser
from jgt.schedule.simulate import number_text, simulate
from train.config import Config
from train.data import config as data_config
from train.data import documents as data_documents
from train.data import files, packed, tokenizer
from train.data.config import MixturePart
from train.journal.accounts import CAUSES, account
from train.journal.events import Event
from train.plan.__main__ import parser as plan_parser
from train.processes.connect import MAX_VIRTUAL_CPU
from train.settings import sections

ROOT = Path(__file__).parent.parent
command_tables = module_from_spec(spec := spec_from_file_location("command_tables", ROOT / "docs" / "command_tables.py"))
spec.loader.exec_module(command_tables)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
README, FIRST, COMMANDS, RULES, TRAINING, PYTHON, SCHEDULES = (
    ROOT / name
    for name in (
        "README.md",
        "docs/first-run.md",
        "docs/commands.md",
        "docs/rules.md",
        "docs/training.md",
        "docs/python.md",
        "docs/schedules.md",
    )
)
SECTIONS = {name: type(value) for name, value in vars(Config()).items() if dataclasses.is_dataclass(value)}
SHIPPED = sorted((ROOT / "configs/rules").glob("*.yaml"))
PIPELINE, PLAN, RELIABILITY = ROOT / "docs/pipeline.md", ROOT / "docs/plan.md", ROOT / "docs/reliability.md"
NOTEBOOK, OWN, SCALING = ROOT / "docs/notebook.md", ROOT / "docs/own.md", ROOT / "docs/scaling.md"
HOOKS, EXPERTS, CONTEXT = ROOT / "docs/hooks.md", ROOT / "docs/experts.md", ROOT / "docs/context.md"
SHARDED = ROOT / "docs/sharded.md"
WEIGHTS, PUBLISHED, NO_RULES = ROOT / "docs/weights.md", ROOT / "docs/published.md", ROOT / "docs/no-rules.md"
needs_plan_gpu = pytest.mark.skipif(
    jax.__version__ != "0.10.2" or not find_spec("jax_cuda13_plugin"), reason="shown for this version, with the extra plan-gpu"
)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path, language, text=None):
    """The fenced blocks of a language."""
    return [body for kind, body in FENCE.findall(path.read_text() if text is None else text) if kind == language]


def section(path, heading):
    """The text below a heading, up to the next heading of the same or a higher level."""
    level = len(heading) - len(heading.lstrip("#"))
    text = f"\n{path.read_text()}".split(f"\n{heading}\n", 1)[1]
    return re.split(rf"\n#{{1,{level}}} ", text)[0]


def rows(text):
    """The cells of each row of the tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not set(line) <= set("|-")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# -- examples ----------------------------------------------------------------------------------------------------


def test_the_first_example_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "rules.yaml").write_text(blocks(FIRST, "yaml")[0])
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(FIRST, "python")
    exec(compile(example, "docs/first-run.md", "exec"), {})
    loss, spec = capsys.readouterr().out.split(maxsplit=1)
    assert 0 < float(loss) < 1
    assert f"`{spec.strip()}`" in FIRST.read_text()


def test_the_model_of_the_readme_is_sharded_by_the_rules_that_it_names():
    (example,) = blocks(README, "python")
    exec(compile(example, "README.md", "exec"), names := {})
    model, x = names["MLP"](), jax.random.normal(jax.random.key(1), (16, 256))
    params = model.init(jax.random.key(0), x)
    mesh = jgt.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    loss = lambda params, x: (model.apply(params, x) ** 2).mean()  # noqa: E731
    sharded = jgt.shard(loss, "jgt:fsdp_tensor", mesh)
    assert float(jax.jit(sharded)(params, x)) == pytest.approx(float(loss(params, x)), rel=1e-5)
    assert "tensor" in jgt.place(loss, "jgt:fsdp_tensor", mesh, params, x).params["params"]["up"]["kernel"].spec


def test_the_examples_of_the_python_page_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    for example in blocks(PYTHON, "python"):
        exec(compile(example, "docs/python.md", "exec"), names)


def test_the_cells_of_the_notebook_page_run(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    names, misses = {}, []

    def count(event, **_):
        if event == "/jax/compilation_cache/cache_misses":
            misses.append(event)

    jax.monitoring.register_event_listener(count)
    try:
        for example in blocks(NOTEBOOK, "python"):
            before = len(misses)
            exec(compile(example, "docs/notebook.md", "exec"), names)
            assert "optimizer.lr={lr}" not in example or len(misses) == before, "the sweep compiled"
    finally:
        jax.monitoring.unregister_event_listener(count)
    assert misses


@pytest.mark.slow
def test_the_cells_of_the_notebook_with_a_published_model_run(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = {}
    for example in blocks(PUBLISHED, "python"):
        exec(compile(example, "docs/published.md", "exec"), names)


def test_the_python_page_has_every_public_name():
    headings = " ".join(re.findall(r"^## (.*)", PYTHON.read_text(), re.MULTILINE))
    assert set(re.findall(r"jgt\.(\w+)", headings)) == set(jgt.__all__)


def test_the_model_without_rules_is_split_as_its_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    vit, own_loop = blocks(NO_RULES, "python")
    Path("vit.py").write_text(vit)
    Path("run.yaml").write_text(blocks(NO_RULES, "yaml")[0])
    assert jgt_main(["check", "run.yaml", "--code", "vit.py"]) == 0
    assert re.search(r"^    (jgt:fsdp splits .*)$", NO_RULES.read_text(), re.MULTILINE)[1] in capsys.readouterr().out
    assert jgt_main(["rules", "run.yaml", "--code", "vit.py"]) == 0
    (shown,) = blocks(NO_RULES, "text")
    assert capsys.readouterr().out == shown
    Path("rules.yaml").write_text(shown)
    assert jgt_main(["check", "run.yaml", "--code", "vit.py", "rules=rules.yaml"]) == 0
    names = {}
    for example in (vit, own_loop):
        exec(compile(example, "docs/no-rules.md", "exec"), names)
    assert not names["gradients"].blocks[0].up.kernel[...].sharding.is_fully_replicated


def test_no_python_stands_elsewhere():
    """Each page with Python has a test that runs it."""
    assert {page for page in PAGES if blocks(page, "python")} == {
        README,
        FIRST,
        PYTHON,
        NOTEBOOK,
        OWN,
        HOOKS,
        EXPERTS,
        CONTEXT,
        WEIGHTS,
        PUBLISHED,
        SHARDED,
        NO_RULES,
    }


def test_the_model_that_names_its_tensors():
    (text,) = blocks(WEIGHTS, "python")
    names = {"nnx": nnx}
    exec(text, names)
    config, tensors = names["Tiny"].hugging_face({"width": 8, "vocab": 64})
    assert config["hidden_size"] == 8 and tensors["layers/mlp/kernel"].format(l=3) == "model.layers.3.mlp.weight"


def test_the_rules_in_the_text_load(tmp_path):
    (tmp_path / "base.yaml").write_text("default: replicate")
    (tmp_path / "tensor.yaml").write_text((ROOT / "configs/rules/tensor.yaml").read_text())
    before_mistakes = RULES.read_text().split("## Error messages")[0]
    examples = blocks(RULES, "yaml", before_mistakes)
    assert len(examples) == 3
    for text in examples:
        (tmp_path / "rules.yaml").write_text(text)
        rules = jgt.load_rules(tmp_path / "rules.yaml")
        assert rules.default == "replicate"
    assert "head" not in [rule.pattern for rule in rules.signals]


def test_the_rules_of_the_readme_are_those_that_are_shipped():
    assert blocks(README, "yaml")[0].strip() in (ROOT / "configs/rules/fsdp_tensor.yaml").read_text()


def test_the_quickstart_is_shown():
    shown = document.parse(blocks(FIRST, "yaml")[1], "docs/first-run.md").plain()
    assert shown == document.read(ROOT / "configs/quickstart.yaml").plain()


# -- own code ----------------------------------------------------------------------------------------------------


def test_the_run_files_of_the_page_on_own_code_are_the_examples():
    """test_examples.py trains them."""
    language, vision, _ = (document.parse(text, "own.md").plain() for text in blocks(OWN, "yaml"))
    for shown, name in ((language, "state_space"), (vision, "digits")):
        run = document.read(ROOT / "examples" / name / "run.yaml").plain()
        assert {key: {inner: run[key].get(inner) for inner in value} for key, value in shown.items()} == shown


def write_lines(folder):
    """The same ten points as JSON lines and Parquet."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    points = [{"x": n / 10, "y": np.sin(n / 10)} for n in range(10)]
    (folder / "a.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    parquet.write_table(pyarrow.Table.from_pylist(points), folder / "a.parquet")


@pytest.mark.slow
def test_the_code_of_the_page_on_own_code_trains(tmp_path, monkeypatch):
    """All Python of the page is one file. Two runs name what is in it: the page's last run file, and the language model alone."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("\n".join(blocks(OWN, "python")))
    Path("waves.yaml").write_text(blocks(OWN, "yaml")[-1])
    waves = jgt.run("waves.yaml", ["run.name=waves"], code="mine.py")
    first, *_, last, evaluation = waves.metrics
    assert last["loss"] < first["loss"] and {"absolute"} < last.keys() and {"eval_loss", "eval_absolute"} < evaluation.keys()
    assert jgt.run("waves.yaml", ["run.name=spline", "model.kind=mine:Spline", "train.loss=mine:spline_loss"], code="mine.py").is_done
    assert jgt.run("waves.yaml", ["run.name=groups", "optimizer={name: 'mine:groups', lr: 0.05}", "train.steps=1"], code="mine.py").is_done
    decoder = {"model": {"layers": 3, "embed": 32, "heads": 2, "ffn": 64, "seq": 16}, "data": {"source": "stdlib", "eval_tokens": 0}}
    last = "optimizer={name: 'mine:last_layers', lr: 0.01, train: [layers/**]}"
    one, three = (jgt.run(decoder, [f"run.name=last{n}", last, f"train.steps={n}"], code="mine.py").state.params for n in (1, 3))
    moved = jax.tree.map(lambda a, b: [bool((a != b).any()) for a, b in zip(a, b, strict=True)], one["layers"], three["layers"])
    assert {tuple(which) for which in jax.tree.leaves(moved, is_leaf=lambda x: isinstance(x, list))} == {(False, True, True)}
    schedule = ["run.name=schedule", "optimizer={name: 'mine:inverse_sqrt', peak: 0.1}", "train.steps=2"]
    assert jgt.run("waves.yaml", schedule, code="mine.py").is_done
    mine = {}
    exec(Path("mine.py").read_text(), mine)
    pairs = ({"image": np.eye(8)[n % 8], "text": np.eye(4)[n % 4]} for n in itertools.count())
    towers = {"model": {"kind": "mine:Towers"}, "train": {"loss": "mine:clip", "steps": 2, "batch": 8}}
    for _ in range(2):
        result = jgt.run(towers, ["run.name=towers", "data.source=x:y"], data=lambda: mine["stored"](pairs, 16, "pairs"), code="mine.py")
    assert "accuracy" in result.metrics[0] and next(pairs)["text"][0] == 1
    write_lines(Path("points"))
    for source, keys in (("simulated", []), *((name, ["data.folder=points"]) for name in ("lines", "parquet"))):
        streamed = ["run.name=" + source, f"data={{source: 'mine:{source}'}}", *keys, "data.shuffle_buffer=5", "train.steps=2"]
        assert jgt.run("waves.yaml", streamed, code="mine.py").is_done
    (model,) = re.findall(r"`(model: \{.*?\})`", OWN.read_text())
    config = document.parse(model, "own.md").plain() | {"run": {"name": "text"}, "train": {"steps": 2, "batch": 8}}
    assert jgt.run(config | {"data": {"source": "stdlib", "eval_tokens": 0}}, ["model.seq=16"], code="mine.py").is_done


@pytest.mark.slow
def test_the_stream_of_web_text_of_the_page_trains_a_decoder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    tokenizers, models = pytest.importorskip("tokenizers"), pytest.importorskip("tokenizers.models")
    monkeypatch.chdir(tmp_path)
    words = models.WordLevel({"a": 1, "[UNK]": 2, "</s>": 3}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save("tokenizer.json")
    Path("web").mkdir()
    Path("web/a.jsonl").write_text("".join(json.dumps({"text": "a a a"}) + "\n" for _ in range(2000)))
    (data,) = re.findall(r"^    (data: .*fineweb.*)", OWN.read_text(), re.MULTILINE)
    run = document.parse(data, "own.md").plain()
    run["data"] |= {"source": "hf:web", "shuffle_buffer": 4}
    run["model"] = {"layers": 1, "embed": 32, "heads": 2, "ffn": 64, "seq": 16}
    first, second, evaluation = jgt.run(run, ["train.steps=2", "train.batch=8"]).metrics
    assert second["loss"] < first["loss"] and evaluation["eval_loss"] > 0


def test_the_rules_and_the_names_of_the_page_on_long_sequences():
    rules, _ = blocks(CONTEXT, "yaml")
    q = jax.random.normal(jax.random.key(0), (2, 64, 4, 8))

    def attend(scale, q):
        names = {"jax": jax, "jgt": jgt, "q": scale * q, "k": q, "v": q}
        with jgt.signal.context("layers"):
            exec(*blocks(CONTEXT, "python"), names)
            return names["heads"] * 1.0

    given = document.parse(rules, "rules.md").plain()
    given |= {"axes": {"batch": ["data"]}, "default": "replicate"}
    del given["signals"]["layers/*"]
    sharded = jgt.shard(attend, given, jgt.make_mesh({"data": 2, "seq": 4}))
    np.testing.assert_allclose(jax.jit(sharded)(2.0, q), attend(2.0, q), atol=1e-6)


@pytest.mark.slow
def test_the_experts_of_the_page_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mixture.py").write_text(*blocks(EXPERTS, "python"))
    run = document.parse(blocks(EXPERTS, "yaml")[2], "experts.md").plain()
    result = jgt.run(run, ["model.seq=16", "data.eval_tokens=0", "train.steps=2", "train.batch=8"], code="mixture.py")
    assert str(result.state.params["up"].sharding.spec[0]) == "expert"


# -- words of other trainers ------------------------------------------------------------------------------------


def test_the_page_for_newcomers_has_the_words_that_are_answered_and_keys_that_exist():
    text = (ROOT / "docs/newcomers.md").read_text()
    known = {f"{name}.{field.name}" for name, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    for word, key in sections.OTHER_WORDS.items():
        assert f"`{word}`" in text, word
        assert set(key.split(" and ")) <= known
    shown = set(re.findall(r"`((?:model|train|optimizer|checkpoint|run|data)\.[a-z_]+)[:`]", text))
    assert len(shown) > 15 and shown - {"model.heads"} <= known | {"train.hidden_size"}


# -- scaling -----------------------------------------------------------------------------------------------------


def arguments_of(command):
    return [f"{ROOT}/{word}" if word.startswith("configs/") else word for word in shlex.split(command)]


def test_the_layouts_of_the_page_on_scaling_fit(capsys):
    commands = re.findall(r"^    jgt train (.*)", SCALING.read_text(), re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        assert jgt_main(["check", *arguments_of(command)]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_layouts_of_the_page_on_scaling_agree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = [
        "train.steps=3",
        "train.eval_every=0",
        "sample.tokens=0",
        "checkpoint.every=100",
        "model.embed=64",
        "model.ffn=128",
        "model.seq=32",
    ]
    losses = []
    # XLA's code generator is not under test.
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        for number, command in enumerate(re.findall(r"^    jgt train (.*)", SCALING.read_text(), re.MULTILINE)):
            file, *overrides = arguments_of(command)
            result = jgt.run(file, [*overrides, *small, f"run.dir=runs/{number}"])
            losses.append([row["loss"] for row in result.metrics if "loss" in row])
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert len(losses) == 6 and len(losses[0]) == 3
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_a_check_of_the_page_on_scaling_looks_as_shown(number, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    command, shown = blocks(SCALING, "text")[number].split("\n", 1)
    code = jgt_main(shlex.split(command.removeprefix("$ jgt ")))
    output = capsys.readouterr()
    assert code == (0, 2)[number]
    assert [line.rstrip() for line in (output.err if code else output.out).splitlines()] == shown.splitlines()


def plans():
    """Arguments and cells of each row of the tables of plans."""
    for table, target in zip(section(SCALING, "## What will it cost").split("| arguments")[1:], ("h100:1x8", "h100:4x8"), strict=True):
        # What is left of the heading's row is not one.
        for arguments, *cells in rows(table):
            yield pytest.param(target, arguments.strip("`"), cells, id=f"{target} {arguments.strip('`')}"[:60])


@pytest.mark.slow
@needs_plan_gpu
@pytest.mark.parametrize(("target", "arguments", "cells"), list(plans()))
def test_a_plan_of_the_page_on_scaling_has_these_numbers(target, arguments, cells, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    jgt_main(["plan", "configs/llama-8b.yaml", "--target", target, *shlex.split(arguments)])
    output = capsys.readouterr().out
    peak, sent, step, speed = cells
    assert re.search(r"^peak +([\d.]+ GB) .*of 84.9 GB", output, re.MULTILINE)[1] == peak
    assert re.search(r"^total .* ([\d.]+ GB)", output, re.MULTILINE)[1] == sent
    if step == "does not fit":
        assert "the step does not fit" in output
    else:
        assert re.search(r"^step: (.*?), ([\d,]+) tokens/s", output, re.MULTILINE).groups() == (step, speed)


# -- mistakes ----------------------------------------------------------------------------------------------------


def mistakes():
    """rules.yaml, command and messages of each mistake that the docs show, with its title as the id."""
    for part in section(RULES, "## Error messages").split("\n### ")[1:]:
        (rules,), (shown,) = blocks(RULES, "yaml", part), blocks(RULES, "text", part)
        command, messages = shown.split("\n", 1)
        yield pytest.param(rules, command.removeprefix("$ jgt "), messages, id=part.splitlines()[0])


@pytest.mark.parametrize(("rules", "command", "messages"), list(mistakes()))
def test_a_mistake_looks_as_shown(rules, command, messages, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(blocks(RULES, "yaml", section(RULES, "## Error messages").split("\n### ")[0])[0])
    Path("rules.yaml").write_text(rules)
    assert jgt_main(shlex.split(command)) == 2
    assert capsys.readouterr().err == messages


def test_a_mistake_in_a_table_looks_as_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (table,), (shown,) = blocks(SCHEDULES, "csv"), blocks(SCHEDULES, "text")
    command, messages = shown.split("\n", 1)
    arguments = shlex.split(command.removeprefix("$ jgt "))
    Path("own.csv").write_text(table)
    assert jgt_main(arguments) == 0, capsys.readouterr().err
    Path("own.csv").write_text(table.replace("F1,F0 B0\nF2 B0,F1 B1", "F1 B0,F0 B0\nF2,F1 B1"))
    assert jgt_main(arguments) == 2
    assert capsys.readouterr().err == messages


# -- schedules ---------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_schedules():
    expected = []
    for name, schedule in schedules.SCHEDULES.items():
        few, many = (simulate(schedules.schedule_table(name, 4, M)) for M in (8, 32))
        expected.append(
            [f"`{name}`", str(schedule.chunks_per_stage(None)), f"{few.bubble:.1%}", f"{many.bubble:.1%}", number_text(many.peak)]
        )
    assert [row[:5] for row in rows(section(SCHEDULES, "## The schedules"))[1:]] == expected


def test_every_option_of_the_schedules_stands_there():
    options = {option for action in schedule_parser()._actions for option in action.option_strings if option not in ("-h", "--help")}
    text = SCHEDULES.read_text()
    assert options == set(re.findall(r"--[a-z][\w-]*", text))
    own = {"--stages", "--microbatches", "--virtual"}
    assert options - own == {row[0].strip("`").split()[0] for row in rows(section(SCHEDULES, "## Options"))[1:]}


# -- plans -------------------------------------------------------------------------------------------------------


@needs_plan_gpu
def test_a_plan_is_as_shown(capsys):
    (shown,) = blocks(PLAN, "text")
    (command,) = re.findall(r"`jgt (plan .*?)`, with jax 0.10.2:", PLAN.read_text())
    assert jgt_main(shlex.split(command)) == 0
    lines = [re.sub(r"in [\d.]+ s", "in 6.8 s", line).rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == shown.splitlines()


def test_every_option_of_a_plan_stands_there():
    options = {option for action in plan_parser()._actions for option in action.option_strings if option not in ("-h", "--help")}
    assert options == {row[0].strip("`").split()[0] for row in rows(PLAN.read_text()) if row[0].startswith("`--")}


def test_every_finding_of_a_plan_and_every_limit_stands_there():
    text = PLAN.read_text()
    assert {row[0].strip("`") for row in rows(section(PLAN, "## What it finds"))[1:]} == set(typing.get_args(FindingKind))
    (example,) = blocks(PLAN, "yaml")
    limits = Budget.read(document.parse(example, "budget.yaml").find("budget"), problems := []).limits
    assert problems == [] and {limit.key for limit in limits if not limit.signal} == set(Budget.KEYS)
    assert all(name in text for name in chip_names())


def test_every_key_of_a_plans_json_stands_there():
    x = jax.ShapeDtypeStruct((4, 4), "float32")
    keys = jgt.plan(lambda x: x @ x, x).to_json()
    text = section(PLAN, "## JSON")
    assert all(f"`{key}`" in text for key in [*keys, *keys["memory"]])
    assert all(f"`{field.name}`" in text for field in dataclasses.fields(Collective))


# -- reports -----------------------------------------------------------------------------------------------------


def test_every_cause_and_every_key_of_a_report_stands_there():
    text = section(RELIABILITY, "## Accounting")
    causes = {row[1].strip("`"): row[0] for row in rows(text) if len(row) == 3}
    assert causes == {"key": "row", **CAUSES}
    details = {"first": 1, "last": 2, "busy": 1.0, "step": 0}
    events = [Event(phase=phase, time=0.0, seconds=1.0, details=details) for phase in ("start", "step")]
    found = account("run", events, {1: events}).to_json()
    documented = {key.strip("` ") for row in rows(text) if len(row) == 2 for key in row[0].split(",")}
    assert documented == {"key", *found}
    inside = [*found["causes"]["steps"], *found["starts"][0], *found["skipped"], *found["throughput"], *found["stragglers"]]
    assert all(f"`{key}`" in text for key in [*inside, *found["stragglers"]["processes"][0]])


def test_the_hooks_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("\n".join(blocks(HOOKS, "python")))
    first, second = blocks(HOOKS, "yaml")
    Path("run.yaml").write_text(first)
    more = document.parse(second, "hooks.md").plain()
    overrides = [f"hooks.counting={more['hooks']['counting']}", "hooks.moved={call: 'mine:Moved', every: 2}", "hooks.draw.every=4"]
    overrides += [f"checkpoint.best={more['checkpoint']['best']}", f"train.stop_early={more['train']['stop_early']}"]
    result = jgt.run("run.yaml", [*overrides, "train.steps=4", "train.eval_every=2", "mesh={data: 1}"], code="mine.py")
    assert {"largest", "moved", "eval_counting"} <= {name for row in result.metrics for name in row}


# -- docstrings of public names --------------------------------------------------------------------------------------


FUNCTIONS = [name for name in jgt.__all__ if name[0].islower() and name != "signal"]


def example_in(name):
    """The indented lines of a docstring."""
    lines = inspect.cleandoc(getattr(jgt, name).__doc__).splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    "))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_an_example_and_its_arguments_and_errors(name):
    text = inspect.cleandoc(getattr(jgt, name).__doc__)
    described = {key for names in re.findall(r"^(\w+(?:, \w+)*): ", text, re.MULTILINE) for key in names.split(", ")}
    arguments = inspect.signature(getattr(jgt, name)).parameters.keys()
    assert f"jgt.{name}(" in example_in(name)
    assert "InputError" in text
    assert described | {"fn"} == arguments | {"fn"}


# docs/python.md has examples of the others, which train.
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("load", "run")])
def test_the_example_of_a_public_function_runs(name):
    def loss(params, batch):
        with jgt.signal.context("mlp"):
            return jnp.mean((batch @ params["w"]) ** 2)

    mesh, params, batch = jgt.make_mesh({"data": -1}), {"w": jnp.ones((16, 8))}, jnp.ones((32, 16))
    names = {"jax": jax, "jgt": jgt, "optax": optax, "loss": loss, "mesh": mesh, "params": params, "batch": batch, "step": loss}
    names |= {"rules": {"axes": {"batch": ["data"]}, "default": "replicate"}, "make": lambda key: {"w": jax.random.normal(key, (16, 8))}}
    names |= {"param_shardings": NamedSharding(mesh, PartitionSpec()), "batch_sharding": NamedSharding(mesh, PartitionSpec("data"))}
    exec(compile(example_in(name), name, "exec"), names)


# -- keys --------------------------------------------------------------------------------------------------------


def test_what_tables_of_keys_leave_to_their_page_stands_there():
    assert "A float is at most 1e30" in TRAINING.read_text()
    assert all(f"`{name}`" in section(PIPELINE, "## Keys") for name in schedules.SCHEDULES)


def test_the_limits_of_files_stand_there():
    page = section(TRAINING, "## Limits")
    numbers = [
        document.compose.MAX_BYTES,
        document.compose.MAX_FILES,
        document.reader.MAX_DEPTH,
        document.reader.MAX_VALUES,
        document.reader.MAX_KEY,
    ]
    numbers += [
        document.problems.MAX_PROBLEMS,
        sizes.MeshSizes.MOST_AXES,
        sizes.MeshSizes.MOST_DEVICES,
        schedules.MAX_CELLS,
        custom.MAX_TABLE_BYTES,
    ]
    numbers += [sections.MAX_FLAGS, sections.MAX_NAME, sections.MAX_PATH, data_config.MAX_PARTS, files.MAX_NAMES]
    numbers += [data_documents.MAX_LINE_BYTES, packed.MAX_RATIO, packed.MAX_EXPANDED, tokenizer.MAX_BYTES]
    assert [number for number in numbers if f"{number:,}" not in page] == []
    assert axes.MAX_AXES == sizes.MeshSizes.MOST_AXES
    assert f"more than {MAX_VIRTUAL_CPU:,} are only for" in TRAINING.read_text()


def test_every_section_stands_there():
    headings = re.findall(r"^## (\w+)$", TRAINING.read_text(), re.MULTILINE)
    assert set(Config.__dataclass_fields__) <= set(headings)


def test_the_keys_of_a_part_of_a_mixture_stand_there():
    text = section(TRAINING, "## data")
    (sentence,) = re.findall(r"A part of a mixture has the keys (.*) as above", text)
    assert {*re.findall(r"`(\w+)`", sentence), "weight", "name"} == set(MixturePart.__dataclass_fields__)


def test_every_key_of_the_rules_stands_there():
    text = RULES.read_text().split("## Specs")[0]
    keys = {row[0].strip("`") for row in rows(text)} - {"key"}
    inside = {f"signals.*.{key.name}" for key in keys_of(SignalRule) if key.name != "backward"}
    backward = {f"signals.*.backward.{key.name}" for key in keys_of(BackwardRule)}
    assert keys == {"extends", *(key.name for key in keys_of(RulesFile))} | inside | backward
    for action in typing.get_args(Action):
        assert f"`{action}`" in text


def test_every_command_has_a_row_and_all_its_flags():
    text, before = COMMANDS.read_text(), COMMANDS.read_text().split("## All flags")[0]
    assert all(f"`jgt {name} " in before for name in find_commands())
    assert command_tables.with_flags(text) == text, "run: python docs/command_tables.py"


# -- files -------------------------------------------------------------------------------------------------------


def test_the_two_lines_of_the_readme():
    lines = README.read_text().splitlines()
    assert "    pip install -e . && jgt train configs/quickstart.yaml" in lines
    assert "    pip install -e '.[test]' && pytest" in lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configs_that_are_named_exist(page):
    text = page.read_text()
    assert all((ROOT / name).is_file() for name in re.findall(r"\bconfigs/[\w/]+\.yaml", text))
    assert all((ROOT / "configs" / name).is_file() for name in re.findall(r"(?<![\w/])rules/\w+\.yaml", text))


def test_every_shipped_rules_file_stands_in_the_table():
    linked = [row[0] for row in rows(section(RULES, "## Included rules files")) if row[0] != "file"]
    assert sorted(linked) == sorted(f"[{path.name}](../configs/rules/{path.name})" for path in SHIPPED)


def test_the_meshes_in_the_table_of_shipped_rules_fit(capsys):
    for name, mesh, _ in rows(section(RULES, "## Included rules files"))[1:]:
        file = re.findall(r"\[(.*?)\]", name)[0]
        experts = ["model.experts={count: 8}"] if file == "experts.yaml" else []
        overrides = [f"rules=rules/{file}", f"mesh={mesh.strip('`')}", *experts]
        assert jgt_main(["check", "--config", str(ROOT / "configs/quickstart.yaml"), *overrides]) == 0, capsys.readouterr().err
