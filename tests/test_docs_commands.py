"""Every command, flag and key that a page shows is one: each command is parsed, and its run file and overrides are read.

The slow part runs each command that needs the repository's files alone, as one who has trained the quickstart would.
"""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from jgt.command.commands import find_commands
from train.__main__ import parser as train_parser
from train.config import Config, load
from train.models.config import OwnModel
from train.settings.code.files import Code, read_code

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = find_commands()
_LINE = re.compile(r"^(?:    |\$ )?jgt ([a-z]+)( .*)?$")
_SYNTAX = re.compile(r" \[(--|key|RUN|options)|\.\.\.|steps\|tokens")
WORDS = {
    "FILE": "run.yaml",
    "RUN": "runs/run",
    "STEP": "3",
    "A:B": "4:9",
    "HOST:PORT": "host:1234",
    "BUCKET": "bucket",
    **dict.fromkeys(("P", "N", "M"), "4"),
    "I": "1",
}
"""What stands for the words of a page."""
QWEN = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def commands():
    """The commands on lines of their own: (page and line, words)."""
    for page in PAGES:
        lines = iter(enumerate(page.read_text().splitlines(), 1))
        for number, line in lines:
            # Prose may begin with the name of jgt.
            if not (match := _LINE.match(line)) or match[1] not in COMMANDS or _SYNTAX.search(line):
                continue
            text = line
            while text.endswith("\\"):
                text = f"{text[:-1]} {next(lines)[1].strip()}"
            for word, value in WORDS.items():
                text = re.sub(rf"(?<![\w-]){word}(?!\w)", value, text)
            words = shlex.split(text.strip().removeprefix("$ "), comments=True)
            words = words[: words.index(">")] if ">" in words else words
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                yield pytest.param(words[1:end], id=f"{page.name}:{number} {' '.join(words[1:end])}"[:80])
                words = words[end + 1 :]


FOUND = list(commands())


def test_there_are_commands():
    assert len(FOUND) > 80


def parsed(words):
    """The arguments of a command; of one that starts processes, those of the run."""
    name, *arguments = words
    if name == "launch":
        at = arguments.index("--")
        COMMANDS[name].parser().parse_args(arguments[:at])
        return train_parser().parse_args(arguments[at + 1 :])
    return COMMANDS[name].parser().parse_args(arguments)


@pytest.mark.parametrize("words", FOUND)
def test_a_command_is_understood(words, capsys):
    try:
        parsed(words)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the commands name: the repository's own files, a run file, and tiny ones of published models."""
    folder = tmp_path_factory.mktemp("folder")
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "rules").symlink_to(ROOT / "configs" / "rules")
    for name in ("Qwen3-8B", "Llama-3.1-70B", "SmolLM2-135M"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(QWEN))
    (folder / "run.yaml").write_text("devices: {virtual_cpu: 8}\n")
    for name in ("mine.py", "mixture.py", "vit.py"):
        (folder / name).write_text("")
    return folder


WITH_FILES = [one for one in FOUND if one.values[0][0] in ("train", "launch", "check", "plan", "verify")]


@pytest.mark.parametrize("words", [one for one in WITH_FILES if "--diff" not in one.values[0]])
def test_its_file_and_its_keys_are_read(words, folder, monkeypatch):
    monkeypatch.chdir(folder)
    arguments = parsed(words)
    # A page shows a rule of its own, or a mistake.
    shown = [key for key in arguments.overrides if not key.startswith(("rules=rule.yaml", "checkpoint.key=", "checkpoint.weights="))]
    if {"train.uneven=refuse", "model.tied=true"} & {*shown}:
        pytest.skip("a mistake on purpose; test_docs.py has what it answers")
    if arguments.config.endswith(".json") or any(key.startswith("model.hf=s3:") for key in shown):
        pytest.skip("a published model in the place of a run's file, or in a bucket")
    code = read_code(arguments.code) if getattr(arguments, "code", None) else Code()
    load(arguments.config, shown, code=code, num_processes=None, reads_data=False)


_ELSEWHERE = re.compile(
    r"hf:|s3:|Qwen3-8B|Llama-3|SmolLM2|smollm2|run\.yaml|runs/(?!quickstart|sft)|gpu\.yaml|own\.csv|--search|--check "
    r"|^(conformance|calibrate|serve|launch)"
)
"""Commands that need a file, a device, a server's client or an hour that is not here."""


def runs_here(words):
    return not _ELSEWHERE.search(" ".join(words))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the repository's files in which the quickstart and sft were trained."""
    folder = tmp_path_factory.mktemp("trained")
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "rules").symlink_to(ROOT / "configs" / "rules")
    for name in ("quickstart", "sft"):
        jgt(folder, "train", f"configs/{name}.yaml", *SMALL)
    return folder


SMALL = ("train.steps=3", "checkpoint.every=1", "train.eval_batches=1")


def jgt(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "jgt", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"jgt {shlex.join(words)}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("words", [one for one in FOUND if runs_here(one.values[0])])
def test_a_command_runs(words, trained):
    if "rules=rules/tensor.yaml" in words:
        pytest.skip("a mistake on purpose; test_docs.py has what it answers")
    # A profile of some steps needs them.
    jgt(trained, *words, *(SMALL if words[0] == "train" and "--profile" not in words else ()))


def known(key):
    """Whether a dotted name is a key, as far as sections have keys of their own."""
    kind, names = Config, key.split(".")
    for number, name in enumerate(names):
        options = [one for one in (typing.get_args(kind) or (kind,)) if dataclasses.is_dataclass(one)]
        if not options or any(hasattr(one, "REST") for one in options if one is not OwnModel):
            # A mapping of the user's own names, such as mesh, rules and hooks.
            return number > 0
        hints = {field: hint for one in options for field, hint in typing.get_type_hints(one).items()}
        if name not in hints:
            return False
        kind = hints[name]
    return True


SECTIONS = [name for name in Config.__dataclass_fields__ if name not in ("mesh", "rules", "budget", "log", "hooks")]
_FILES = (".py", ".yaml", ".json", ".jsonl", ".npz", ".csv", ".txt", ".gz", ".safetensors")
_KEY = re.compile(rf"`((?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+)(?:[:=][^`]*)?`")


def test_a_key_that_does_not_exist_is_found():
    assert known("train.steps") and known("checkpoint.export.path") and known("data.mixture") and known("train.stop_early.patience")
    assert not known("train.step") and not known("checkpoint.export.paht") and not known("trian.steps")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_in_the_text_exists(page):
    keys = {key for key in _KEY.findall(page.read_text()) if not key.endswith(_FILES)}
    # The page shows a mistake with the one, and the other is of Flax.
    assert [key for key in sorted(keys - {"train.hidden_size", "model.apply"}) if not known(key)] == []


_INLINE = re.compile(r"`jgt ([a-z]+) ([^`]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_in_the_text_exists(page):
    wrong = []
    for name, rest in _INLINE.findall(page.read_text()):
        if name not in COMMANDS:
            continue
        flags = {option for action in COMMANDS[name].parser()._actions for option in action.option_strings}
        wrong += [f"jgt {name} {flag}" for flag in re.findall(r"(?<!\S)--[a-z-]+", rest.partition(" -- ")[0]) if flag not in flags]
    assert wrong == []
