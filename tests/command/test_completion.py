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
    assert offered(bash, "jgt", "") == [*find_commands()]
    assert {"--help", "--version"} <= set(offered(bash, "jgt", "--"))
    assert offered(bash, "jgt", "tr") == ["train", "trace"]
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


STEPS = ["train.steps=", "train.stop_early.by=", "train.stop_early.patience="]


def test_bash_offers_the_keys_of_a_run_file(bash, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").touch()
    assert offered(bash, "jgt", "train", "run.yaml", "train.st") == offered(bash, "jgt", "check", "train.st") == STEPS
    # Files come first.
    assert offered(bash, "jgt", "train", "tra") == ["train.yaml"]
    assert offered(bash, "jgt", "generate", "run", "generate.top_") == ["generate.top_k=", "generate.top_p="]
    # Those of a built-in model and of one of the user's own.
    assert {"model.kind=", "model.heads=", "data.path=", "data.resume=", "mesh=", "pipeline.axis="} < set(bash.split())
    assert offered(bash, "jgt", "train", "") == ["train.yaml"]
    assert offered(bash, "jgt", "report", "train.st") == []


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_offers_the_keys_of_a_run_file(tmp_path):
    (tmp_path / "jgt.fish").write_text(script("fish"))
    command = f"source {tmp_path}/jgt.fish; cd {tmp_path}; complete -C 'jgt train run.yaml train.st'; complete -C 'jgt train j'"
    done = subprocess.run(["fish", "--no-config", "-c", command], capture_output=True, text=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines() if line] == [*STEPS, "jgt.fish"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_offers_the_keys_of_a_run_file_behind_it(tmp_path):
    (tmp_path / "script").write_text(script("zsh"))
    # A session that types, and waits for what completes the line.
    session = f"""
        zmodload zsh/zpty; zpty shell zsh -f
        zpty -w shell 'autoload -Uz compinit; compinit -u -D; eval "$(cat {tmp_path}/script)"; print rea""dy'
        zpty -r -m shell text '*ready*'
        zpty -w -n shell $'jgt train run.yaml train.ste\t'
        zpty -r -m shell text '*train.steps=*' && print -r found"""
    done = subprocess.run(["zsh", "-f", "-c", session], capture_output=True, text=True, timeout=60)
    assert done.stdout == "found\n", done.stderr


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
