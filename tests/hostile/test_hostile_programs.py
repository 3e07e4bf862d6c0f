"""Programs, code and places outside that a stranger's run file or run directory names: nothing of it is run, loaded or written."""

import json
import os

import pytest
import yaml
from hostile import refused, table, watched

import train.launch.__main__ as launch
from jgt import document
from train.config import load
from train.config.schema import schemas
from train.journal.status import ask
from train.run.directory.folder import place_problems
from train.run.directory.identity import Resume, check_places
from train.run.load import open_run_folder
from train.settings.code.files import Code

ALERTS = "alerts={command: [touch, /tmp/ran], disk: 1.0}"


@pytest.mark.parametrize("more", [[], ["--resume", "never"], [ALERTS]])
def test_a_run_file_names_no_program_for_alerts(folder, empty, more):
    (empty / "run.yaml").write_text("alerts: {command: [touch, ran], disk: 1.0}\n")
    (problem,) = refused(empty, "--config", "run.yaml", *more)
    place = "command line: alerts.command: " if ALERTS in more else "run.yaml:1: "
    assert problem.startswith(place) and "alerts.command: names a program" in problem and "--allow-command" in problem
    assert launch.main(["--processes", "1", "--", "run.yaml", *more]) == 2
    assert [path.name for path in empty.iterdir()] == ["run.yaml"]


def test_a_run_file_names_no_folder_of_tasks(folder, empty):
    (empty / "tasks").mkdir()
    (empty / "run.yaml").write_text("eval: {include: tasks}\n")
    (problem,) = refused(empty, "--config", "run.yaml")
    assert problem.startswith("run.yaml:1: eval.include: names a program") and "--allow-command" in problem
    # Whoever starts the run may name them.
    check_places(load("run.yaml", ["eval.include=tasks"]), Resume())


def test_a_program_that_was_allowed_is_not_stored(folder):
    run = load(folder / "base.yaml", ["alerts={command: [curl, -H, 'Authorization: secret'], disk: 0.5}"])
    assert run.config.alerts.command[0] == "curl"
    assert "secret" not in document.dump(run.resolved()) and run.resolved()["alerts"]["disk"] == 0.5


@pytest.mark.parametrize("cache", ["programs", "../programs", "/tmp/programs", "auto", None])
def test_a_run_that_is_read_names_no_cache_and_no_program(empty, cache):
    config = {"xla": {"cache": cache}, "alerts": {"command": ["touch", "ran"]}, "hooks": {"a": {"call": "code:f", "every": 1}}}
    (empty / "run").mkdir()
    (empty / "run" / "config.yaml").write_text(document.dump(config))
    with watched(empty):
        config = open_run_folder("run", Code())[1].config
    assert config.xla.cache == (None if cache is None else "auto") and config.alerts is None and config.hooks == {}
    assert open_run_folder("run", Code(), ["xla.cache=mine"])[1].config.xla.cache == "mine"


LINKS = [
    *(
        "profile/signals.json",
        "profile/slices-0.json",
        "profile/costs-0.json",
        "profile/plugins",
        "profile/plugins/profile",
        "profile/trial",
    ),
    *("profile/process-1", "configs/step-1.yaml", "code/a.py", "origin/tokenizer.json", "data/tokens", "faults/0", "logs/process-0.log"),
    *(
        "tensorboard/a",
        "request.json",
        "request.json.new",
        "status-0.json.new",
        "events.jsonl",
        "stacks-0.txt",
        "reference.npz",
        "layout.json",
    ),
]


@pytest.mark.parametrize("entry", LINKS)
@pytest.mark.parametrize("kind", ["file", "folder", "pipe"])
def test_a_link_or_a_pipe_in_a_run_directory_is_refused(folder, tmp_path, entry, kind):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / entry).parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(run / entry)
    else:
        (run / entry).symlink_to(outside)
        outside.mkdir() if kind == "folder" else outside.write_text("precious")
    (problem,) = refused(tmp_path, "--config", str(folder / "base.yaml"), f"run.dir={run}")
    assert f"run.dir: {run / entry} is n" in problem
    assert outside.is_dir() if kind == "folder" else kind == "pipe" or outside.read_text() == "precious"


def test_a_folder_with_many_links_gives_few_lines(tmp_path):
    (tmp_path / "profile").mkdir()
    for number in range(20):
        (tmp_path / "profile" / str(number)).symlink_to("/etc/passwd")
    assert len([*place_problems(tmp_path, moved=False)]) == 5
    assert [*place_problems(tmp_path, moved=True)] == []


@pytest.mark.parametrize("name", ["request.json", "request.json.new"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_who_asks_a_strangers_run_writes_nothing_outside(tmp_path, name, kind):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_text("precious")
    (run / name).symlink_to(outside) if kind == "link" else os.mkfifo(run / name)
    with watched(tmp_path):
        ask(run, "save")
    assert outside.read_text() == "precious"
    assert json.loads((run / "request.json").read_text()) == {"save": True} and not (run / "request.json").is_symlink()


KEYS = table("run_keys")


def keys_of(schema, path=""):
    """The dotted keys of a JSON Schema. `*` stands for any name."""
    if isinstance(schema, list):
        for part in schema:
            yield from keys_of(part, path)
    for name, part in schema.items() if isinstance(schema, dict) else ():
        below = {f"{path}.{key}".lstrip("."): child for key, child in part.items()} if name == "properties" else {}
        below |= {f"{path}.*": part} if name == "additionalProperties" and isinstance(part, dict) else {}
        yield from below
        for key, child in (below or {f"{path}[]" if name == "items" else path: part}).items():
            yield from keys_of(child, key)


def listed(case):
    return case["keys"].split() if isinstance(case["keys"], str) else case["keys"]


def test_every_key_of_a_run_says_what_it_may_name_and_what_guards_it():
    stated = [key for case in KEYS.values() for key in listed(case)]
    assert sorted(stated) == sorted({*keys_of(schemas()["run"])})
    assert all(case["guard"] for case in KEYS.values())


@pytest.mark.parametrize("argument", [argument for case in KEYS.values() for argument in case.get("refused", ())])
def test_a_key_that_may_name_a_program_is_guarded(folder, empty, argument):
    key, _, value = argument.partition("=")
    tree = yaml.safe_load(value)
    for part in reversed(key.split(".")):
        tree = {part: tree}
    (empty / "run.yaml").write_text(yaml.safe_dump(tree))
    assert refused(empty, "--config", "run.yaml")
    assert [path.name for path in empty.iterdir()] == ["run.yaml"]
