"""`jgt completion SHELL`: what each shell offers after some words."""

import contextlib
import io
import shutil
import subprocess

import pytest

from jgt.__main__ import main
from jgt.command.commands import find_commands
from jgt.command.completion import SHELLS, Words
from train.__main__ import parser as train_parser

AWKWARD = {"x": Words(purpose="it's $HOME, `a` \\ (b): c", flags={"--a": 'say "b"', "--b": "it's"}, choices=("p", "q"))}


def offered(script, *words):
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _jgt; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "--norc", "-euo", "pipefail", "-c", code], capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout.split()


@pytest.fixture(scope="module")
def bash():
    return script("bash")


def script(shell):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["completion", shell]) == 0
    return out.getvalue()


def test_bash_offers_commands(bash):
    assert offered(bash, "jgt", "") == [*find_commands(), "--help", "--version"]
    assert offered(bash, "jgt", "tr") == ["train"]
    assert offered(bash, "jgt", "nothing") == []


def test_bash_offers_the_flags_of_a_command(bash):
    assert set(offered(bash, "jgt", "train", "run.yaml", "--")) == {*train_parser().flags(), "--help"}
    assert offered(bash, "jgt", "plan", "--ta") == ["--target", "--targets"]
    assert offered(bash, "jgt", "schema", "r") == ["run", "rules"]
    # Files: what the shell offers by itself.
    assert offered(bash, "jgt", "train", "ru") == []


def test_bash_offers_the_flags_of_a_run_after_the_dashes_of_the_launcher(bash):
    assert offered(bash, "jgt", "launch", "--re") == ["--restarts"]
    assert offered(bash, "jgt", "launch", "--processes", "2", "--", "run.yaml", "--re") == ["--replay", "--resume"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_reads_its_script(shell, tmp_path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    for text in (script(shell), "\n".join(SHELLS[shell](AWKWARD))):
        (tmp_path / "script").write_text(text)
        done = subprocess.run([program, "-n", str(tmp_path / "script")], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_names_every_command_and_flag(shell):
    text = script(shell)
    for name, command in find_commands().items():
        parser = command.parser()
        assert name in text and all(flag.removeprefix("--") in text for flag in ([] if parser is None else parser.flags()))


def test_text_from_help_runs_nothing():
    assert "\n".join(SHELLS["fish"](AWKWARD)) == (
        "complete -c jgt -n __fish_use_subcommand -f -a x -d 'it\"s $HOME, `a` / (b): c'\n"
        "complete -c jgt -n '__fish_seen_subcommand_from x' -l a -d 'say \"b\"'\n"
        "complete -c jgt -n '__fish_seen_subcommand_from x' -l b -d 'it\"s'\n"
        "complete -c jgt -n '__fish_seen_subcommand_from x' -f -a 'p q'"
    )


def test_a_shell_that_is_not_known(capsys):
    with pytest.raises(SystemExit) as left:
        main(["completion", "tcsh"])
    assert left.value.code == 2
    assert "invalid choice: 'tcsh' (choose from " in capsys.readouterr().err
