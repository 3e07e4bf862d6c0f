"""Keys are read from files and variables, and never shown; a signature covers every value of a manifest."""

import json

import pytest

from jgt.document import InputError
from train.checkpoint import manifest
from train.checkpoint.contents import file_entries
from train.checkpoint.listing import Manifest
from train.checkpoint.manifest import BrokenError, UnsignedError
from train.checkpoint.signature import Key, read_key
from train.checkpoint.steps import Steps

SECRET = b"0123456789abcdef"


@pytest.fixture
def step(tmp_path):
    """The folder of a step with one file that is not signed."""
    steps = Steps(tmp_path)
    (steps.saving(5) / "state").mkdir(parents=True)
    (steps.saving(5) / "state" / "array").write_bytes(b"content")
    files = file_entries(steps.saving(5), sha256=False)
    steps.finish(Manifest(step=5, samples=80, mesh={}, versions={}, fingerprints={"config": {"lr": 3e-3}}, arrays=(), files=files))
    return steps.path(5)


def test_a_key_comes_from_a_file_or_a_variable(tmp_path, monkeypatch):
    (tmp_path / "key").write_bytes(SECRET + b"\r\n")
    monkeypatch.setenv("JGT_KEY", SECRET.decode())
    assert read_key(str(tmp_path / "key")) == read_key("env:JGT_KEY") == Key(secret=SECRET)
    assert read_key(None) is None
    assert "0123" not in repr(read_key("env:JGT_KEY"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("env:JGT_NO_SUCH_KEY", "the environment variable JGT_NO_SUCH_KEY is not set"),
        ("nowhere", "nowhere: cannot be read: No such file or directory"),
        (".", "it is a folder, not a file"),
        ("short", "the key in short has 15 bytes, which is too short"),
        ("empty", "the key in empty has 0 bytes, which is too short"),
        ("long", "the file is larger than 4,096 bytes"),
    ],
)
def test_a_key_that_is_missing_or_too_short_is_refused(name, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, content in {"short": SECRET[1:] + b"\n", "empty": b"", "long": bytes(5000)}.items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_key(name, "a.yaml:3: checkpoint.key")
    (line,) = caught.value.problems
    assert line.startswith("a.yaml:3: checkpoint.key: ") and problem in line and "Name a file with a key of 16 to 4096 bytes" in line


def test_any_other_value_is_another_signature(step):
    key, steps = Key(secret=SECRET), Steps(step.parent, Key(secret=SECRET))
    with pytest.raises(UnsignedError, match="it is not signed"):
        steps.read(5)
    steps.sign(5)
    assert steps.read(5).files[0].sha256
    values = json.loads((step / manifest.NAME).read_text())
    # The order of the keys and the spaces between them are not part of it.
    (step / manifest.NAME).write_text(json.dumps(dict(reversed(values.items()))))
    assert steps.read(5).samples == 80
    forgeries = [{**values, name: None} for name, value in values.items() if name != "signature" and value is not None] + [
        values | {"new": 1},
        values | {"signature": "\u00e9"},
    ]
    forgeries += [values | {"signature": values["signature"].upper()}, values | {"signature": 5}]
    for forged in forgeries:
        assert key.problem(forged) == "its signature does not match checkpoint.key"
    assert Key(secret=SECRET + b"0").problem(values) is not None
    (step / "state" / "array").write_bytes(b"forged!")
    with pytest.raises(BrokenError, match="checksum"):
        steps.read(5)
