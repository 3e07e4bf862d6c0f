"""The list has every constraint of the rewritten program, with the line of its rule and of its operation."""

import inspect
import json
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from programs import all_constraints

import jgt
from jgt.command.commands import main
from jgt.program.dims import sharding_dims, show_dims
from jgt.signal import context, tensor

RULES = """\
axes: {batch: [data]}
inputs: {"**": [batch, ...]}
params:
  head: [tensor, null]
signals:
  mlp:
    params: {up: [null, tensor], down: [tensor, null]}
    tensors: {hidden: [batch, tensor]}
    out: [batch, null]
    backward: {out: [batch, tensor]}
default: replicate
"""


def loss(params, x):
    def layer(h, w):
        with context("mlp"):
            hidden = tensor(jax.nn.relu(h @ w["up"]), "hidden")
            return h + hidden @ w["down"], None

    h, _ = jax.lax.scan(layer, x * params["scale"], params["layers"])
    return (h @ params["head"].astype(jnp.bfloat16).astype(jnp.float32)).mean()


LAYERS = {"up": jnp.ones((3, 256, 512)), "down": jnp.ones((3, 512, 256))}
PARAMS = {"layers": LAYERS, "head": jnp.ones((256, 256)), "scale": jnp.ones((1, 256))}
X = jnp.ones((8, 256))
MESH = jgt.make_mesh({"data": 2, "tensor": 4})


def line_of(text):
    lines, first = inspect.getsourcelines(loss)
    (number,) = [n for n, line in enumerate(lines, first) if text in line]
    return f"{Path(__file__).relative_to(Path.cwd())}:{number}"


@pytest.fixture
def by_file(tmp_path):
    (tmp_path / "rules.yaml").write_text(RULES)
    return jgt.shard(loss, str(tmp_path / "rules.yaml"), MESH)


def in_program(sharded, *args):
    """The signal and the spec of each constraint in the program that a call runs."""
    program = jax.make_jaxpr(sharded)(*args)
    shardings = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "sharding_constraint":
                shardings.append(equation)
            for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                if inner := getattr(value, "jaxpr", value if hasattr(value, "eqns") else None):
                    walk(inner)

    walk(program.jaxpr)
    specs = [show_dims(sharding_dims(e.params["sharding"], e.invars[0].aval.ndim)) for e in shardings]
    paths = [path for path, _ in all_constraints(sharded, *args)]
    assert len(paths) == len(specs)
    return Counter(zip(paths, specs, strict=True))


@pytest.mark.parametrize("rules", ["own", "jgt:fsdp", "jgt:fsdp_tensor"])
def test_each_constraint_of_the_program_is_listed_once(rules, by_file):
    sharded = by_file if rules == "own" else jgt.shard(loss, rules, jgt.make_mesh({"data": 1, "fsdp": 2, "tensor": 4}))
    listed = sharded.inserted(PARAMS, X)
    # Arguments are constrained at the top of the program, and not where they are used.
    of_arguments = [one for one in listed if one.value.startswith(("parameter ", "input "))]
    others = [one for one in listed if one not in of_arguments]
    found = Counter([("", one.spec) for one in of_arguments] + [(one.signal, one.spec) for one in others])
    assert found == in_program(sharded, PARAMS, X)
    assert len(others) >= 3


def test_the_lines_of_rules_and_operations(by_file, tmp_path):
    rows = {one.value: one for one in by_file.inserted(PARAMS, X)}
    file = f"{tmp_path}/rules.yaml"
    expected = {
        "parameter head": (f"{file}:4", line_of('params["head"]'), "", (256, 256), "[tensor, null]", "[tensor, null]"),
        "parameter layers/up": (f"{file}:7", line_of('w["up"]'), "mlp", (3, 256, 512), "[null, null, tensor]", "[null, null, tensor]"),
        "parameter layers/down": (f"{file}:7", line_of('w["down"]'), "mlp", (3, 512, 256), "[null, tensor, null]", "[null, tensor, null]"),
        "parameter scale": ("default", line_of('params["scale"]'), "", (1, 256), "[null, null]", "[null, null]"),
        "input x": (f"{file}:2", "", "", (8, 256), "[data, null]", "[data, null]"),
        "tensor hidden": (f"{file}:8", line_of('"hidden"'), "mlp", (8, 512), "[data, tensor]", "[data, tensor]"),
        "value that leaves mlp": (f"{file}:9 and {file}:10", line_of('w["down"]'), "mlp", (8, 256), "[data, null]", "[data, tensor]"),
        "cast of an argument": (f"{file}:4", line_of('params["head"]'), "", (256, 256), "[tensor, null]", "[tensor, null]"),
    }
    found = {name: (r.rule, r.operation, r.signal, r.shape, r.spec, r.backward) for name, r in rows.items()}
    found = {("input x" if name.startswith("input") else name): row for name, row in found.items()}
    assert found == expected
    text = str(by_file.inserted(PARAMS, X))
    assert text.splitlines()[0].split() == ["rule", "operation", "signal", "value", "shape", "spec"]
    assert "[data, null] backward [data, tensor]" in text and text.endswith("\n8 constraints")


def test_on_one_device_nothing_is_inserted(tmp_path):
    mesh = jgt.make_mesh({"data": 1, "tensor": 1}, devices=jax.devices()[:1])
    assert len(jgt.shard(loss, jgt.make_rules({"default": "replicate"}), mesh).inserted(PARAMS, X)) == 0


def test_rules_that_do_not_fit_are_problems():
    with pytest.raises(jgt.InputError, match="no parameter matches"):
        jgt.shard(loss, {"params": {"other": ["data"]}, "default": "replicate"}, MESH).inserted(PARAMS, X)


@pytest.mark.parametrize("config", ["quickstart", "pipeline"])
def test_the_command_shows_them(config, capsys):
    assert main(["check", f"jgt:{config}", "--inserted"]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"fsdp_tensor.yaml:17 +train/models/mlp.py:\d+ +layers/mlp +tensor hidden +32x128x384 +\[\[data, fsdp\], null, tensor\]", text
    )
    assert main(["check", f"jgt:{config}", "--inserted", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert text.endswith(f"\n{len(printed['inserted'])} constraints\n") and printed["ok"] and printed["parameters"]
    assert main(["check", f"jgt:{config}", "--inserted", "mesh.data=3"]) == 2
