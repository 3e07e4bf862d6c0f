"""`jgt COMMAND`: every command is found, in every folder, and a wrong name or flag is answered with the right one."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import jgt
from jgt.__main__ import main
from jgt.command.commands import find_commands
from jgt.command.parser import CommandParser
from train.__main__ import parser as train_parser

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def refused(capsys):
    """Parses arguments, which must fail with exit code 2; returns the lines of the message."""

    def _refused(parser, *arguments):
        with pytest.raises(SystemExit) as left:
            parser.parse_args(arguments)
        assert left.value.code == 2
        return capsys.readouterr().err.splitlines()

    return _refused


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert {"train", "launch", "report", "check", "plan", "schedule"} <= set(find_commands())
    assert all(f"\n  {name} " in text for name in find_commands())


@pytest.mark.parametrize(
    "arguments", [["s3://bucket/run.yaml"], ["run.yaml", "--token-file", "s3://bucket/run"], ["--code=s3://bucket/run"]]
)
def test_a_url_is_no_path(refused, arguments):
    url = arguments[-1].removeprefix("--code=")
    (line,) = refused(train_parser(), *arguments)
    assert line.startswith(f"command line: '{url}' is a URL, but jgt reads and writes files only")


@pytest.mark.parametrize("name", sorted(find_commands()))
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: jgt {name} ")


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"jgt {jgt.__version__} (jax {importlib.metadata.version('jax')}, Python 3.")


def test_a_command_inside_a_process_leaves_it_to_itself(tmp_path, capsys):
    """A training that was started by a command ends its process at its end, also if a thread of another library would wait."""
    before, interrupt = set(threading.enumerate()), signal.getsignal(signal.SIGINT)
    assert main(["train", str(tmp_path / "missing.yaml")]) == 2
    assert set(threading.enumerate()) <= before and signal.getsignal(signal.SIGINT) == interrupt


def with_output(arguments, file):
    command = [sys.executable, "-m", "jgt", *arguments]
    done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, cwd=QUICKSTART.parents[1])
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], -signal.SIGPIPE),
        (["schema"], -signal.SIGPIPE),
        (["train", str(QUICKSTART), "--print-config"], 0),
        pytest.param(["check", str(QUICKSTART)], -signal.SIGPIPE, marks=pytest.mark.slow),
    ],
)
def test_a_command_whose_reader_has_left_ends_quietly(arguments, code):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        assert with_output(arguments, file) == (code, "")


def test_output_that_cannot_be_written_is_one_line():
    with Path("/dev/full").open("w") as file:
        assert with_output(["schema"], file) == (1, "jgt: stdout cannot be written: No space left on device\n")


@pytest.mark.parametrize(("name", "answer"), [("tarin", "Did you mean 'train'?"), ("a\nb", "Known: init, train, ")])
def test_a_wrong_command(name, answer, capsys):
    assert main([name]) == 2
    line, usage = capsys.readouterr().err.splitlines()
    assert answer in line and usage.startswith("usage: jgt COMMAND")


def test_without_a_command_all_are_shown_in_groups(capsys):
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "\nLayout:\n  check  " in text and all(text.count(f"\n  {name} ") == 2 for name in find_commands())


def test_a_command_of_another_package(monkeypatch, capsys):
    entry = importlib.metadata.EntryPoint(name="shout", value="builtins:print", group="jgt.commands")
    ours = importlib.metadata.EntryPoint(name="train", value="builtins:print", group="jgt.commands")
    monkeypatch.setattr("jgt.command.commands.entry_points", lambda group: [entry, ours])
    assert find_commands()["train"].name != "print"
    main(["shout", "a"])
    assert capsys.readouterr().out == "['a']\n"


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--dryrun", "--dryrun: unknown flag. Did you mean '--dry-run'?"),
        ("--confg=a.yaml", "--confg: unknown flag. Did you mean '--config'?"),
        ("--conf", "--conf: unknown flag. Did you mean '--config'?"),
        ("--lr", "--lr: unknown flag. Known: "),
        ("--train.steps=5", "--train.steps: is not a flag. An override of the run's file has no dashes: train.steps=VALUE"),
        ("--a\x1b[31m", r"--a\x1b[31m: unknown flag. Known: "),
    ],
)
def test_a_wrong_flag(flag, answer, refused):
    (line,) = refused(train_parser(), "run.yaml", flag)
    assert line.startswith(f"command line: {answer}")


def test_all_wrong_flags_come_at_once_and_before_a_missing_one(refused):
    parser = CommandParser("jgt x", "Tests.")
    parser.add_argument("--processes", required=True)
    assert [line.split(":")[1] for line in refused(parser, "--procesess", "2", "--y")] == [" --procesess", " --y"]
    assert refused(parser) == ["command line: the following arguments are required: --processes. `jgt x --help` lists all flags"]
    assert refused(parser, "--processes=1", "more") == ["command line: 'more' cannot be given here. `jgt x --help` lists all flags"]
    assert refused(parser, "--processes") == ["command line: --processes: expected one argument. `jgt x --help` lists all flags"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run.yaml", "a.b=1", "c=2", "--dry-run"],
        ["--config", "run.yaml", "a.b=1", "--dry-run", "c=2"],
        ["a.b=1", "--dry-run", "run.yaml", "c=2"],
    ],
)
def test_the_file_of_a_run_needs_no_flag_and_may_come_anywhere(arguments):
    parsed = train_parser().parse_args(arguments)
    assert (parsed.config, parsed.overrides, parsed.dry_run) == ("run.yaml", ["a.b=1", "c=2"], True)


def test_a_run_without_a_file(refused):
    assert refused(train_parser(), "a.b=1") == [
        "command line: a run's file is missing. Write jgt train run.yaml. `jgt train --help` lists all flags"
    ]


@pytest.mark.parametrize("program", [["-m", "train"], ["-m", "jgt", "train"]], ids=" ".join)
def test_both_spellings_train(program, root):
    command = [sys.executable, *program, str(QUICKSTART), "train.steps=7", "--print-config"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  steps: 7\n" in done.stdout
