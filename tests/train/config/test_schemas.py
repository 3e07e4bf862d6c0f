"""The schemas in configs/schema are up to date, and every shipped file validates."""

import json
import re
from pathlib import Path

import pytest

from jgt import document
from jgt.__main__ import main
from train.__main__ import main as train_main
from train.config.schema import NAMES, schema_text, schemas

jsonschema = pytest.importorskip("jsonschema")

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = sorted(path for path in CONFIGS.rglob("*.yaml"))
MODELINE = re.compile(r"# yaml-language-server: \$schema=(\S+)")


EXAMPLES = sorted(path for path in (CONFIGS.parent / "examples").rglob("*.yaml"))


def is_rules(path):
    return path.parent.name == "rules" or path.name == "rules.yaml"


def problems(name, text):
    value = document.parse(text, "f.yaml").plain()
    return [error.message for error in jsonschema.Draft7Validator(schemas()[name]).iter_errors(value)]


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_up_to_date(name):
    jsonschema.Draft7Validator.check_schema(schemas()[name])
    assert (CONFIGS / "schema" / f"{name}.json").read_text() == schema_text(name), "run: jgt schema --write configs/schema"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_file_names_its_schema_and_validates(path):
    named = MODELINE.match(path.read_text())[1]
    schema = path.parent / named
    assert schema.name == ("rules.json" if is_rules(path) else "run.json")
    value = document.parse(path.read_text(), str(path)).plain()
    jsonschema.Draft7Validator(json.loads(schema.read_text())).validate(value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(CONFIGS.parent)))
def test_every_example_validates(path):
    assert problems("rules" if is_rules(path) else "run", path.read_text()) == []


def test_a_resolved_config_validates(capsys):
    # Every key is in it. `jgt train` is for a process of its own, which it ends if threads hold it.
    assert train_main([str(CONFIGS / "pipeline.yaml"), "--print-config"]) == 0
    assert problems("run", capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run", "train: {stpes: 1}"),
        ("run", "train: {steps: 0}"),
        ("run", "modle: {}"),
        ("run", "model: {kind: lama}"),
        ("run", "model: {layer: 1}"),
        ("run", "mesh: {data: two}"),
        ("run", "rules: {signal: {}}"),
        ("run", "pipeline: {schedule: 1}"),
        ("run", "budget: {peak_gb: x}"),
        ("run", "data: {source: mixture, mixture: [{source: stdlib}]}"),
        ("rules", "signals: {mlp: {output: []}}"),
        ("rules", "signals: {mlp: {out: data}}"),
        ("rules", "signals: {mlp: {save: {x: drop}}}"),
        ("rules", "default: shard"),
        ("rules", "axes: {batch: 1}"),
    ],
)
def test_mistakes_are_seen(name, text):
    assert problems(name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run", "extends: jgt:quickstart\nrules: null\nmesh: {data: -1}"),
        ("run", "model: {kind: 'my_models:Mamba', state: 16}"),
        ("run", "rules: {axes: {batch: [data]}, default: replicate}"),
        ("run", "budget: {peak_gb: 1, layers/attn: {all-gather: 0}}"),
        ("run", "extends: a.yaml\npipeline: {microbatches: 4}"),
        ("rules", "inputs: [data, ...]\nsignals: {a: null, b: {backward: {out: [[data, fsdp], null, '...']}}}"),
        ("rules", "inputs: {x: [data]}\noptimizer: {'**': [data, ...]}\naxes: {batch: data}"),
    ],
)
def test_what_is_right_validates(name, text):
    assert problems(name, text) == []


def test_the_command(tmp_path, capsys):
    assert main(["schema", "rules"]) == 0
    assert json.loads(capsys.readouterr().out) == schemas()["rules"]
    assert main(["schema", "--write", str(tmp_path / "a")]) == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["rules.json", "run.json"]
    (tmp_path / "file").touch()
    assert main(["schema", "--write", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.endswith("cannot be written: File exists\n")
