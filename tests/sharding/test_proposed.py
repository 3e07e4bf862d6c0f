"""Tensor parallelism that is proposed for models without names is what a person would write, changes no number, and sends no more."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from foreign import FOREIGN
from proposals import MODELS

import jgt
from jgt.program.tracing import trace
from jgt.replacements.replacement import ParameterPlace
from jgt.sharding.tensor.propose import propose
from train.config import load
from train.setup import prepare

QUICK = ("bert",)
SIZES = {"fsdp": 2, "tensor": 4}
each_model = pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in MODELS])


@pytest.fixture(autouse=True)
def allows_what_strangers_write():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def mesh():
    return jgt.make_mesh(SIZES)


def split_by(places, axis="tensor"):
    return {p.path: d for p in places for d, axes in enumerate(p.dims) if axis in axes}


@pytest.mark.parametrize("name", MODELS)
def test_the_proposal_is_what_a_person_writes(name, mesh):
    model = MODELS[name]()
    shapes = jax.eval_shape(model.init)
    placement = jgt.shard(model.loss, "jgt:fsdp_tensor", mesh).placement(shapes, model.batch)
    assert split_by(placement.parameters) == model.by_hand and placement.rules.reads == ("fsdp",)
    # Large parameters are split over fsdp, too, along another dim.
    large = [p for p in placement.parameters if p.path in model.by_hand and len(p.shape) > 1 and math.prod(p.shape) >= 1 << 16]
    assert large and {p.path for p in large} == split_by(placement.parameters, "fsdp").keys() & model.by_hand.keys()
    said, *whole = placement.rules.notes
    assert said == f"tensor splits the matmuls of {len(model.by_hand)} parameters"
    assert [re.sub(r"^params/| is whole over tensor: .*$", "", line) for line in whole] == list(model.whole)
    # Another axis of the same size has another name, and one that does not divide the heads leaves attention whole.
    three = jgt.shard(model.loss, {"otherwise": {"tensor": "model"}, "default": "replicate"}, jgt.abstract_mesh({"model": 3}))
    few = three.placement(shapes, model.batch).rules
    assert any(": 3 devices do not divide " in line for line in few.notes) and len(few.notes) > len(whole) + 1


@each_model
def test_the_proposal_changes_no_number(name, mesh):
    model = MODELS[name]()
    assert jgt.verify(model.loss, "jgt:fsdp_tensor", mesh, model.init(), model.batch).is_right


@each_model
def test_it_sends_what_rules_written_by_hand_send(name, mesh):
    model = MODELS[name]()
    shapes = jax.eval_shape(model.init)
    placement = jgt.shard(model.loss, "jgt:fsdp_tensor", mesh).placement(shapes, model.batch)
    by_hand = {p.path: [("tensor",) if d == model.by_hand.get(p.path) else None for d in range(len(p.shape))] for p in placement.parameters}
    by_hand = {path: [axes for d, axes in enumerate(spec) if d not in sliced(placement, path)] for path, spec in by_hand.items()}
    rules = {"axes": {"batch": ["fsdp"]}, "params": by_hand, "default": "replicate"}

    def plan(rules):
        sharded = jgt.shard(model.loss, rules, mesh)
        places = sharded.placement(shapes, model.batch)
        shardings = {"in_shardings": (places.params, places.inputs(model.batch)), "out_shardings": (places.replicated(), places.gradients)}
        return jgt.plan(jax.jit(jax.value_and_grad(sharded), **shardings), shapes, model.batch)

    def sent(plan):
        return sum(c.total_bytes for c in plan.collectives if c.axes == ("tensor",))

    proposed, written = plan("jgt:fsdp_tensor"), plan(rules)
    assert 0 < sent(proposed) <= 1.05 * sent(written)
    assert not [finding.text for finding in proposed.findings if finding.kind == "computed-alike"]


def sliced(placement, path):
    return next(p.sliced for p in placement.parameters if p.path == path)


def test_the_shipped_decoder_without_its_rules_is_split_as_by_them(tmp_path):
    (tmp_path / "any.yaml").write_text("axes: {batch: [data, fsdp]}\ndefault: replicate\notherwise: {params: [fsdp], tensor: [tensor]}\n")
    overrides = ["model.embed=256", "model.ffn=512", "model.vocab=512", "model.seq=32"]

    def places(rules):
        placement = prepare(load("configs/quickstart.yaml", [*overrides, f"rules={rules}"]), num_devices=8).storage.model
        return split_by(placement.parameters)

    assert places(tmp_path / "any.yaml") == places("jgt:fsdp_tensor") != {}


@pytest.mark.parametrize("name", FOREIGN)
def test_parameters_are_split_evenly_or_whole_for_a_reason(name):
    """On models that were written for nothing of this: no proposal splits a dim unevenly, twice, or along which a scan goes."""
    model = FOREIGN[name]()
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    placement = jgt.shard(model.loss, "jgt:fsdp_tensor", jgt.abstract_mesh({"data": 1, **SIZES})).placement(shapes, model.batch)
    proposed, notes = placement.rules.reads == ("fsdp",), " ".join(placement.rules.notes)
    for p in placement.parameters:
        found = [d for d, axes in enumerate(p.dims) if "tensor" in axes]
        assert len(found) <= 1 and not p.sliced & {*found}
        assert not proposed or all(p.shape[d] % 4 == 0 for d in found)
        if proposed and math.prod(p.shape) >= 1 << 16 and not found:
            assert re.sub(r"(?<![^/])[0-9]+(?![^/])", "*", p.path) + " is whole over tensor: " in notes


# -- which dims belong together ---------------------------------------------------------------------------------------


def proposal(fn, params, x, parts=4):
    program, _ = trace(lambda leaves, x: fn(dict(zip(sorted(params), leaves, strict=True)), x), [params[k] for k in sorted(params)], x)
    places = [
        ParameterPlace(path=k, shape=params[k].shape, dtype=params[k].dtype, signals=(), dims=(), optimizer_dims=()) for k in sorted(params)
    ]
    return propose(program, places, parts, 1)


W = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
X = jnp.ones((4, 8))


def mlp(between):
    return lambda p, x: between(x @ p["up"]) @ p["down"]


def custom(h):
    fn = jax.custom_jvp(lambda h: jnp.tanh(h) * h)
    fn.defjvp(lambda primals, tangents: (fn(primals[0]), tangents[0]))
    return fn(h)


@pytest.mark.parametrize(
    "between",
    [
        jax.nn.gelu,
        jax.jit(jax.nn.relu),
        custom,
        jax.checkpoint(jnp.tanh),
        lambda h: jax.lax.cond(h.sum() > 0, jnp.sin, jnp.cos, h),
        lambda h: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), h, None, length=3)[0],
        lambda h: jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c), h),
        lambda h: h / jnp.sqrt((h**2).mean(-1, keepdims=True)),
        lambda h: h.reshape(4, 8, 2).transpose(1, 0, 2).swapaxes(0, 1).reshape(4, 16),
        lambda h: jnp.where(h > 0, h, 0.0).astype(jnp.bfloat16).astype(jnp.float32),
        lambda h: h[::2].repeat(2, axis=0),
    ],
    ids=["gelu", "jit", "custom_jvp", "remat", "cond", "scan", "while", "norm", "heads", "where", "rows"],
)
def test_columns_then_rows(between):
    found = proposal(mlp(between), W, X)
    assert found.dims == {"up": 1, "down": 0} and found.whole == {}


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda h: jnp.roll(h, 1, axis=-1), r"moves along it \((slice|concatenate)\)"),
        (lambda h: jnp.cumsum(h, axis=-1), r"moves along it \(cumsum\)"),
        (lambda h: jnp.sort(h, axis=-1), r"moves along it \(sort\)"),
        (lambda h: jnp.concatenate([h[:, 8:], h[:, :8]], -1), r"moves along it"),
        (lambda h: h[:, ::-1], r"moves along it \(rev\)"),
        (lambda h: h.reshape(4, 2, 8).swapaxes(1, 2).reshape(4, 16), "reshapes it|do not divide 2"),
        (lambda h: jnp.fft.fft(h).real, r"moves along it \(fft\)|is not understood \(fft\)"),
        (lambda h: h @ h.T @ h, r"sums over it between two activations"),
        (lambda h: jnp.linalg.cholesky(h.T @ h)[:4], r"(sums|is not understood|twice|moves)"),
    ],
    ids=["roll", "cumsum", "sort", "swapped", "reversed", "turned", "fft", "scores", "cholesky"],
)
def test_what_moves_along_hidden_units_keeps_them_whole(between, why):
    # The columns of x are whole, too, so that nothing of the first kernel is left to be split.
    found = proposal(lambda p, x: mlp(between)(p, jnp.sort(x, axis=-1)), W, X)
    assert "up" not in found.dims and re.search(rf"dim 1: .*({why})", found.whole["up"])


def test_residuals_and_square_matrices_stay_whole():
    found = proposal(lambda p, x: x + jnp.tanh(x @ p["w"]), {"w": jnp.ones((8, 8))}, X)
    assert found.dims == {} and "a value has it twice" in found.whole["w"]


def test_a_table_is_split_by_rows_and_a_convolution_by_features():
    params = {"table": jnp.ones((64, 8)), "head": jnp.ones((8, 64))}
    assert proposal(lambda p, ids: p["table"][ids] @ p["head"], params, jnp.ones(4, int)).dims == {"table": 0, "head": 1}
    params = {"one": jnp.ones((3, 3, 4, 32)), "two": jnp.ones((3, 3, 32, 4))}

    def convolved(p, x):
        for name in ("one", "two"):
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, p[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return x

    assert proposal(convolved, params, jnp.ones((2, 8, 8, 4))).dims == {"one": 3, "two": 2}


def test_sizes_that_do_not_divide_are_said():
    found = proposal(mlp(jnp.tanh), {"up": jnp.ones((9, 18)), "down": jnp.ones((18, 9))}, jnp.ones((4, 9)))
    assert found.dims == {} and found.whole["up"] == "dim 0: 4 devices do not divide 9; dim 1: 4 devices do not divide 18"
