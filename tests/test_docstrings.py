"""Docstrings are sentences or name what they describe: none of them is a caption such as "Of the last four" or "How many there are"."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_BEGINNING = re.compile(r"(Of|So many|That of|By (how|what)|How (much|many|often)|What)\b")
"""A docstring that begins so has no verb, or a subordinate clause in the place of its subject."""
_CAPTION = re.compile(r"\b\w+: of (the|such|a)\b")
"""`seed: of the order` leaves out what the seed is. `seed: the seed of the order` says it."""


def docstrings(path):
    """The line and the text of each docstring of a file, those of constants and of fields included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def captions(path):
    """The docstrings of a file that are captions."""
    return [f"{path}:{line}: {text}" for line, text in docstrings(path) if _BEGINNING.match(text) or _CAPTION.search(text)]


@pytest.mark.parametrize("package", ["jgt", "train"])
def test_no_docstring_is_a_caption(package):
    found = [caption for path in sorted((ROOT / package).rglob("*.py")) for caption in captions(path)]
    assert not found, "\n".join(["Write a sentence, or name what is described:", *found])


@pytest.mark.parametrize(
    ("text", "is_caption"),
    [
        ("How many layers there are.", True),
        ("What a layer keeps.", True),
        ("Of the last four, kernels hide a share.", True),
        ("A model. step: of the checkpoint.", True),
        ("The number of layers.", False),
        ("Office hours.", False),
        ("A model. step: the step of the checkpoint.", False),
    ],
)
def test_captions_are_found(tmp_path, text, is_caption):
    path = tmp_path / "module.py"
    path.write_text(f'"""{text}"""\n')
    assert bool(captions(path)) is is_caption
