"""The notebooks in docs/ run from the first cell to the last, and print what they show."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
_RUN = """
import contextlib, io, json, sys
names, printed = {}, []
for source in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(source, "cell", "exec"), names)
    printed.append(output.getvalue())
print(json.dumps(printed))
"""


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_counts(path):
    """A count of executions, or an id, would be another one after each run."""
    cells = code_cells(path)
    assert len(cells) > 3 and all(cell["execution_count"] is None and "id" not in cell for cell in cells)
    for cell in cells:
        compile("".join(cell["source"]), path.name, "exec")


@pytest.mark.slow
@pytest.mark.skipif(not (find_spec("tokenizers") and find_spec("jinja2")), reason="needs the extras tokenizers and chat")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # One device, as a reader has.
    monkeypatch.delenv("XLA_FLAGS")
    cells = code_cells(path)
    sources = json.dumps(["".join(cell["source"]) for cell in cells])
    done = subprocess.run([sys.executable, "-c", _RUN, sources], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    for cell, printed in zip(cells, json.loads(done.stdout.splitlines()[-1]), strict=True):
        for output in cell["outputs"]:
            assert printed == "".join(output["text"])
