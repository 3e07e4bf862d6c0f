"""Small programs on 8 devices whose communication can be counted by hand. `python tests/helpers/counted.py` writes their goldens.

It compiles each for CPU and for described H100s, with the installed jaxlib, and writes tests/goldens/hlo/. The rows that the test reads
from these files are written by `UPDATE_GOLDENS=1 pytest tests/planner/hlo/test_golden_texts.py`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import P

import jgt
from jgt.planner.compiled import compile_function
from jgt.planner.described import devices_of
from jgt.planner.hardware.target import Target
from jgt.signal import context

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens" / "hlo"
TARGETS = {"cpu": None, "h100": Target.parse("h100:1x8")}
BATCH, EMBED, FFN, OUT = 8, 16, 32, 24
ROUNDS = 5


def mlp(devices):
    """Loss and gradients of weights and inputs. Weights are sharded over tensor by columns, then by rows; the batch over data."""
    mesh = jgt.make_mesh(MESHES["mlp"], devices=devices)

    def loss(params, x):
        with context("mlp"):
            return jnp.mean(jnp.square(jnp.tanh(x @ params["up"]) @ params["down"]))

    params = {"up": array(mesh, P(None, "tensor"), EMBED, FFN), "down": array(mesh, P("tensor", None), FFN, OUT)}
    return jax.value_and_grad(loss, argnums=(0, 1)), (params, array(mesh, P("data", None), BATCH, EMBED))


def fsdp(devices):
    """Loss and gradient. The rows of the weights, of the gradient and of the batch are sharded over fsdp."""
    mesh = jgt.make_mesh(MESHES["fsdp"], devices=devices)

    def loss(weights, x):
        with context("linear"):
            return jnp.mean(jnp.square(x @ weights))

    weights = array(mesh, P("fsdp", None), EMBED, FFN)
    return jax.jit(jax.value_and_grad(loss), out_shardings=(None, weights.sharding)), (
        weights,
        array(mesh, P("fsdp", None), 2 * BATCH, EMBED),
    )


def ring(devices):
    """Each stage sends its value to the next stage, ROUNDS times."""
    mesh = jgt.make_mesh(MESHES["ring"], devices=devices)
    stages = mesh.shape["stage"]

    def local(x):
        def send(x, _):
            return jnp.sin(jax.lax.ppermute(x, "stage", [(s, (s + 1) % stages) for s in range(stages)])), None

        with context("ring"):
            return jax.lax.scan(send, x, length=ROUNDS)[0]

    spec = P("data", "stage")
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec), (array(mesh, spec, BATCH, EMBED),)


def exchange(devices):
    """Every device sends a block to every other one."""
    mesh = jgt.make_mesh(MESHES["exchange"], devices=devices)

    def local(x):
        with context("dispatch"):
            return jax.lax.all_to_all(x, "expert", split_axis=1, concat_axis=0)

    return jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")), (array(mesh, P("expert"), 2 * BATCH, BATCH),)


def array(mesh, spec, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))


PROGRAMS = {"mlp": mlp, "fsdp": fsdp, "ring": ring, "exchange": exchange}
MESHES = {"mlp": {"data": 2, "tensor": 4}, "fsdp": {"fsdp": 8}, "ring": {"data": 2, "stage": 4}, "exchange": {"expert": 8}}


def main():
    """Writes the text of each program for each target, as the installed jaxlib compiles it."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for name, make in PROGRAMS.items():
        for kind, target in TARGETS.items():
            fn, args = make(jax.devices() if target is None else devices_of(target))
            text = compile_function(fn, args, target).text.replace(f"{ROOT}/", "")
            (GOLDENS / f"{name}.{kind}.{jax.lib.__version__}.txt").write_text(text)


if __name__ == "__main__":
    main()
