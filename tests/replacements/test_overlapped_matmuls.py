"""Which matmuls `overlap:` finds: models of several kinds against the same model without a mesh, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from models import compiled
from plugin import needs_plugin

import jgt
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.signal import context, tensor
from train.models.config import GPTConfig, ModelConfig
from train.models.decoder import Decoder
from train.models.kernels import XLA
from train.setup.remat import with_remat_of

ROWS, SEQ, EMBED, FFN = 4, 16, 8, 32
BLOCK = {
    "params": {"{up,gate}*": [None, "tensor"], "down*": ["tensor", None]},
    "tensors": {"normed": ["data", None, None], "hidden": ["data", None, "tensor"]},
    "out": ["data", "tensor", None],
    "backward": {"tensors": {"normed": ["data", "tensor", None]}},
    "overlap": "tensor",
}
RULES = {"inputs": ["data"], "signals": {"mlp": BLOCK}, "default": "replicate"}


def mesh_of(**sizes):
    return jgt.make_mesh(sizes, devices=jax.devices()[: np.prod(list(sizes.values()))])


def params():
    rng = np.random.default_rng(0)
    shapes = {"up": (EMBED, FFN), "gate": (EMBED, FFN), "down": (FFN, EMBED)}
    return {name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}


X = np.random.default_rng(1).normal(size=(ROWS, SEQ, EMBED)).astype(np.float32)


def mlp(p, x, read=lambda x: x):
    """A gated MLP with a residual; `read` sees the normed rows before the matmuls do."""
    with context("mlp"):
        normed = read(tensor(x / (1 + jnp.abs(x)), "normed"))
        hidden = tensor(jnp.tanh(normed @ p["gate"]) * (normed @ p["up"]), "hidden")
        return x + hidden @ p["down"]


def loss(p, x):
    return jnp.sum(mlp(p, x) ** 2)


def gradients(fn, *args, rules=None, mesh=None):
    return compiled(jax.value_and_grad(jgt.shard(fn, rules, mesh)))(*args)


def assert_equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # The gradient of a bias that softmax cancels is 0 but for rounding.
        assert np.max(np.abs(a - b)) <= 1e-5 * np.max(np.abs(b)) + 1e-7


def regions_in(fn, *args):
    """The names of the programs in the regions of a traced function, with what is inside scans and derivatives."""

    def found(program):
        for equation in jx.body(program).eqns:
            if equation.primitive.name == "on_devices":
                yield type(equation.params["plan"]).__name__
            for inner in subprograms(equation):
                yield from found(inner)

    return sorted(found(jax.make_jaxpr(fn)(*args)))


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 4}, pytest.param({"data": 1, "tensor": 8}, marks=pytest.mark.slow)])
def test_a_function_of_plain_jax(sizes):
    mesh = mesh_of(**sizes)
    assert_equal(gradients(loss, params(), X, rules=RULES, mesh=mesh), gradients(loss, params(), X))
    # gate and up share one ring.
    assert regions_in(jgt.shard(loss, RULES, mesh), params(), X) == ["Gathered", "Scattered"]


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable], ids=["recomputed", "matmuls kept"])
def test_recomputed_layers_in_a_scan(policy):
    stack = jax.tree.map(lambda w: np.stack([w, w / 2]), params())

    def deep(p, x):
        layer = jax.checkpoint(lambda x, p: (mlp(p, x), None), policy=policy)
        return jnp.sum(jax.lax.scan(layer, x, p)[0] ** 2)

    mesh = mesh_of(data=2, tensor=2)
    assert_equal(gradients(deep, stack, X, rules=RULES, mesh=mesh), gradients(deep, stack, X))
    traced = jax.make_jaxpr(jax.grad(jgt.shard(deep, RULES, mesh)))(stack, X)
    dots = sum(e.primitive.name == "on_devices" for e in everything(traced))
    # Forward 2, backward 2, and the first again where nothing is kept; the second is not needed again.
    assert dots == (5 if policy is None else 4)


def everything(program):
    for equation in jx.body(program).eqns:
        yield equation
        for inner in subprograms(equation):
            yield from everything(inner)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        with context("mlp"):
            normed = tensor(linen.LayerNorm()(x), "normed")
            dense = partial(linen.Dense, dtype=jnp.float32)
            hidden = tensor(jnp.tanh(dense(FFN, name="gate")(normed)) * dense(FFN, name="up")(normed), "hidden")
            return x + dense(EMBED, name="down")(hidden)


@pytest.mark.slow
def test_linen():
    model = Linen()
    block = {**BLOCK, "params": {"{up,gate}/kernel": [None, "tensor"], "down/kernel": ["tensor", None]}}
    rules = {**RULES, "signals": {"mlp": block}}
    p = model.init(jax.random.key(0), X)

    def summed(p, x):
        return jnp.sum(model.apply(p, x) ** 2)

    mesh = mesh_of(data=2, tensor=4)
    assert_equal(gradients(summed, p, X, rules=rules, mesh=mesh), gradients(summed, p, X))
    assert regions_in(jgt.shard(summed, rules, mesh), p, X) == ["Gathered", "Scattered"]


def decoder(kind, remat, seq=32):
    config = {"llama": ModelConfig, "gpt": GPTConfig}[kind](layers=2, embed=64, heads=8, kv_heads=8, ffn=128, vocab=64, seq=seq)
    graph, p = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (8, seq), 0, 64)

    def nats(p, batch):
        scores = jax.nn.log_softmax(nnx.merge(graph, p)(batch["x"]))
        return -jnp.mean(jnp.take_along_axis(scores, batch["y"][..., None], -1))

    return with_remat_of(nats, remat, XLA, "run.yaml:1"), p, {"x": tokens, "y": jnp.roll(tokens, -1, 1)}


@pytest.mark.parametrize(
    ("kind", "remat", "sizes"),
    [
        ("llama", "block", {"data": 1, "fsdp": 2, "tensor": 4}),
        pytest.param("llama", "none", {"data": 2, "fsdp": 1, "tensor": 4}, marks=pytest.mark.slow),
        pytest.param("llama", "matmuls", {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("gpt", "block", {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("gpt", ("up", "heads"), {"data": 1, "fsdp": 1, "tensor": 8}, marks=pytest.mark.slow),
    ],
)
def test_the_trainers_models(kind, remat, sizes):
    nats, p, batch = decoder(kind, remat)
    mesh = mesh_of(**sizes)
    assert_equal(gradients(nats, p, batch, rules="jgt:overlap", mesh=mesh), gradients(nats, p, batch))
    assert regions_in(jgt.shard(nats, "jgt:overlap", mesh), p, batch) == ["Gathered"] * 2 + ["Scattered"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 1, "stage": 2, "tensor": 2}, {"data": 1, "fsdp": 1, "stage": 2, "tensor": 4}])
def test_inside_a_pipeline(sizes, tmp_path):
    block = "tensors: {operand: [batch, null, null]}, out: [batch, tensor, null], backward: {tensors: {operand: [batch, tensor, null]}}"
    lines = [f"  layers/{name}: {{{block}, overlap: tensor}}" for name in ("attn", "mlp")]
    rules = tmp_path / "rules.yaml"
    rules.write_text("\n".join(["extends: jgt:rules/pipeline", "signals:", "  embed: {out: [batch, tensor, null]}", *lines, ""]))
    nats, p, batch = decoder("llama", "block")
    run = compiled(jax.value_and_grad(jgt.shard(nats, rules, mesh_of(**sizes), pipeline=jgt.Pipeline(signal="layers", microbatches=2))))
    assert_equal(run(p, batch), gradients(nats, p, batch))
    text = run.lower(p, batch).compile().as_text()
    assert all(f"{signal}/shard_map/jgt.on_devices/ppermute" in text for signal in ("sig.attn", "sig.mlp")), "the stages have rings"


# -- what is not found ------------------------------------------------------------------------------------------


def problems_of(fn, rules, mesh, *args):
    with pytest.raises(jgt.InputError) as error:
        jgt.shard(fn, rules, mesh)(*args)
    return error.value.problems


def changed(**more):
    return {**RULES, "signals": {"mlp": {**BLOCK, **more}}}


def test_a_tensor_that_others_read_too():
    def fn(p, x):
        return jnp.sum(mlp(p, x, lambda normed: normed + jnp.sum(normed)))

    (problem,) = problems_of(fn, RULES, mesh_of(data=2, tensor=4), params(), X)
    assert "the tensor normed at mlp is read at" in problem and "which is not such a matmul" in problem


def test_weights_that_the_axis_does_not_divide():
    p = jax.tree.map(lambda w: w[..., :30] if w.shape[-1] == FFN else w[:30], params())
    rules = changed(params={}, tensors={"normed": ["data", None, None]})
    del rules["signals"]["mlp"]["params"]
    found = problems_of(loss, rules, mesh_of(data=2, tensor=4), p, X)
    assert len(found) == 2 and all("of the weights [" in problem and "which tensor=4 does not divide" in problem for problem in found)


def test_a_signal_whose_matmuls_wait_for_nothing():
    rules = changed(out=["data", None, None], backward={})
    (problem,) = problems_of(loss, rules, mesh_of(data=2, tensor=4), params(), X)
    assert problem.startswith("rules: mlp: overlap: no matmul of this signal waits for tensor.")


def test_an_axis_that_the_mesh_does_not_have():
    found = problems_of(loss, changed(overlap="tensr"), mesh_of(data=2, tensor=4), params(), X)
    assert any("mlp: overlap: the mesh has no axis 'tensr'. Did you mean 'tensor'?" in problem for problem in found)


def test_an_axis_of_one_device_hides_nothing():
    mesh = mesh_of(data=4, tensor=1)
    assert regions_in(jgt.shard(loss, RULES, mesh), params(), X) == []


@jax.custom_vjp
def straight_through(x, w):
    return x @ w


straight_through.defvjp(lambda x, w: (x @ w, (x, w)), lambda xw, c: (jnp.zeros_like(xw[0]), jnp.outer(xw[0].sum((0, 1)), c.sum((0, 1)))))


def test_a_matmul_with_another_derivative_is_not_one():
    def fn(p, x):
        with context("mlp"):
            normed = tensor(x / (1 + jnp.abs(x)), "normed")
            y = x + tensor(jnp.tanh(straight_through(normed, p["gate"])), "hidden") @ p["down"]
        return jnp.sum(y)

    p = {name: w for name, w in params().items() if name != "up"}
    (problem,) = problems_of(fn, RULES, mesh_of(data=2, tensor=4), p, X)
    assert "which is not such a matmul" in problem


@needs_plugin
def test_a_plan_for_gpus_shows_what_is_hidden():
    embed, ffn = 4096, 16384
    mesh = jgt.abstract_mesh({"data": 1, "tensor": 8})
    shapes = {"up": (embed, ffn), "gate": (embed, ffn), "down": (ffn, embed)}
    p = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    x, rows = jax.ShapeDtypeStruct((8, 4096, embed), jnp.bfloat16), ["data", "tensor", None]
    plain, rings = (
        # With the gradient of x: the block is one of many.
        jgt.plan(jax.value_and_grad(jgt.shard(loss, {**rules, "inputs": rows}, mesh), argnums=(0, 1)), p, x, target="h100:1x8")
        for rules in (changed(overlap=None), RULES)
    )
    assert plain.exposed_ms["tensor"] > 1
    assert rings.exposed_ms["tensor"] < 0.35 * plain.exposed_ms["tensor"]
    # Matmuls in eight parts are slower than whole ones, which takes back a half of what is hidden.
    assert rings.step_time_ms < 0.96 * plain.step_time_ms
    # Nothing else has changed: what is computed, and what is sent, where.
    assert rings.flops_per_device == plain.flops_per_device
    sent = {(c.signal, c.axes) for c in rings.collectives if c.total_bytes > 1000}
    assert sent == {("mlp", ("tensor",))}
    assert {c.kind for c in rings.collectives if c.total_bytes > 1000} == {"collective-permute"}
    assert rings.warnings == []
