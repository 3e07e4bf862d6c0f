"""The layouts that jgt expects are those that XLA's Shardy chooses, as its dumps show."""

import json
import os
import re
import subprocess
import sys

import pytest

CODE = """
import json, sys
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxlib.mlir import ir
import jgt
from jgt.sharding.partitioner import corrected, placed

mesh = jgt.make_mesh({"d": 2, "f": 2, "t": 2})
put = lambda x, *spec: lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

def loop(x, w):
    return jnp.sum(put(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), put(x, "d", "t"), put(w, None, None, "d"))[0], "d", ("f", "t")) ** 2)

def checkpointed(x, w):
    layer = jax.checkpoint(lambda h, w: (jax.nn.relu(h @ w), jnp.sum(h)))
    return jnp.sum(put(lax.scan(layer, put(x, ("d", "f")), put(w, None, "f", "t"))[0], "t", "d") ** 2)

def branches(x, w):
    return jnp.sum(lax.cond(x.sum() > 0, lambda: put(x, "d") @ w[0], lambda: put(w[1], None, "t") @ x))

function = jax.grad({"loop": loop, "checkpointed": checkpointed, "branches": branches}[sys.argv[1]], argnums=(0, 1))
lowered = jax.jit(function).lower(jnp.ones((8, 8)), jnp.ones((3, 8, 8)))
lowered.compile()
module = lowered.compiler_ir()
with module.context, ir.Location.unknown():
    layouts = [op.given for op in placed.Placed.of(module).layouts() if len(op.arrays) == 3]
    print(json.dumps([corrected.layout_text(given[-1:] * 2).split(" -> ")[1] for given in layouts]))
"""


@pytest.mark.parametrize("name", ["loop", "checkpointed", "branches"])
def test_layouts_of_matmuls_are_those_that_xla_dumps(name, tmp_path):
    flags = f"--xla_force_host_platform_device_count=8 --xla_dump_to={tmp_path} --xla_dump_hlo_pass_re=shardy.*"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", CODE, name], capture_output=True, text=True, env=environment, check=True)
    expected = json.loads(done.stdout.splitlines()[-1])
    (folder,) = [path for path in (tmp_path / "shardy").iterdir() if len((path / "02.after_propagation.mlir").read_text()) > 3000]
    text = (folder / "02.after_propagation.mlir").read_text()
    found = [
        re.search(r"sdy\.sharding = #sdy\.sharding_per_value<\[<@mesh, \[(.*?)\]>", line)[1]
        for line in text.splitlines()
        if "= stablehlo.dot" in line
    ]
    assert len(expected) >= 2
    assert sorted(map(spelled, found)) == sorted(expected)


def spelled(dims):
    """Shardy's `{"d", "f"}, {}` as `[[d, f], null]`."""
    parts = [re.findall(r'"(\w+)"', dim) for dim in re.findall(r"\{(.*?)\}", dims)]
    return "[" + ", ".join("null" if not axes else axes[0] if len(axes) == 1 else f"[{', '.join(axes)}]" for axes in parts) + "]"
