"""`jgt rules`: the page "You have a sharded program", from its program to its rules and to another mesh."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jgt.command.commands import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sharded.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def run(*arguments, cwd):
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_on_sharded_programs(tmp_path):
    program, elsewhere = blocks("python")
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "elsewhere.py").write_text(elsewhere)
    (command,) = re.findall(r"^    jgt (rules .+)$", PAGE, re.MULTILINE)
    assert run("-m", "jgt", *command.split(), cwd=tmp_path) == "Wrote rules.yaml\n"
    assert (tmp_path / "rules.yaml").read_text() == blocks("yaml")[0]
    printed = run("elsewhere.py", cwd=tmp_path).splitlines()
    assert any(line.endswith("3 layouts of its own, which are dropped") for line in printed)
    assert any(line.startswith("The layout changes no number: 4 arrays") for line in printed)
    assert printed[-1] == "True"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("made = 3", "names:made is 3. Name a class or a function"),
        ("def made(): return 3", r"names:made returned a int. It must return a function and its arguments: \(fn, params, x\)"),
        ("def made(): return 1 / 0", "names:made failed: .*ZeroDivisionError"),
        ("def made(): return (lambda p, x: p @ x, 1.0, 2.0)", "names:made: the function failed: .*TypeError"),
        ("import numpy as np\ndef made(): return (lambda p, x: p @ x, np.ones(2), np.ones(2))", "rules_of: nothing names a mesh"),
    ],
)
def test_what_has_no_layout_is_refused(text, said, tmp_path, capsys):
    (tmp_path / "names.py").write_text(text)
    assert main(["rules", "names:made", "--code", str(tmp_path / "names.py")]) == 2
    assert re.search(said, capsys.readouterr().err)
