"""`jgt completion SHELL`: what each shell offers after some words."""

import contextlib
import io
import shutil
import subprocess

import pytest

from jgt.__main__ import main
from jgt.command.commands import find_commands
from train.__main__ import parser as train_parser

SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")


def offered(script, *words):
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_jgt; printf "%s\\n" "${{COMPREPLY[@]}}"'
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
    assert offered(bash, "jgt", "") == [*find_commands()]
    assert {"--help", "--version"} <= set(offered(bash, "jgt", "--"))
    assert offered(bash, "jgt", "tr") == ["train"]
    assert offered(bash, "jgt", "nothing") == []


def test_bash_offers_the_flags_of_a_command(bash):
    assert set(offered(bash, "jgt", "train", "run.yaml", "--")) == {*train_parser().flags(), "--help"}
    assert offered(bash, "jgt", "plan", "--ta") == ["--target", "--targets"]
    assert offered(bash, "jgt", "schema", "r") == ["run", "rules"]
    assert offered(bash, "jgt", "plot", "--ov") == ["--over"]
    assert offered(bash, "jgt", "plot", "a", "--over", "h") == ["hours"]


def test_bash_offers_files_where_there_is_nothing_else(bash, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").touch()
    assert offered(bash, "jgt", "train", "ru") == offered(bash, "jgt", "train", "--config", "ru") == ["run.yaml"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_reads_its_script(shell, tmp_path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script(shell))
    done = subprocess.run([program, "-n", str(tmp_path / "script")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_names_every_command_and_flag(shell):
    text = script(shell)
    for name, command in find_commands().items():
        parser = command.parser()
        assert name in text and all(flag.removeprefix("--") in text for flag in ([] if parser is None else parser.flags()))


def test_a_shell_that_is_not_known(capsys):
    with pytest.raises(SystemExit) as left:
        main(["completion", "ksh"])
    assert left.value.code == 2
    assert "invalid choice: 'ksh' (choose from " in capsys.readouterr().err
