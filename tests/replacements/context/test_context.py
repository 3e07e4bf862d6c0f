"""Attention on a split sequence: the values, gradients and bytes of each method, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgt
from jgt import signal
from jgt.document import InputError
from train.models.kernels import XLA

# Long enough for XLA's CPU backend to call a library for matmuls: it compiles small ones for seconds.
B, S, N, G, H, D = 4, 256, 8, 4, 8, 32


def attended(kind, q, k, v, documents, sinks=None):
    if kind == "sinks":
        scores = jnp.einsum("bqkgh,bskh->bkgqs", q.reshape(*q.shape[:2], G, -1, H), k) / np.sqrt(H)
        is_seen = jnp.arange(q.shape[1])[:, None] >= jnp.arange(q.shape[1])[None]
        scores = jnp.where(is_seen[None, None, None], scores, -1e30)
        column = jnp.broadcast_to(sinks.reshape(1, G, -1, 1, 1), (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], -1), -1)[..., :-1]
        return jnp.einsum("bkgqs,bskh->bqkgh", weights, v).reshape(q.shape)
    if kind == "packed":
        return XLA.attend(q, k, v, mask=documents[:, None, :, None] == documents[:, None, None, :])
    if kind == "window":
        return XLA.attend(q, k, v, window=80)
    return jax.nn.dot_product_attention(q, k, v, is_causal=kind == "causal")


def make_loss(kind="causal", *, layers=0, seq=S, remat=True):
    def layer(x, weights, documents):
        with signal.context("attn"):
            q, k, v = (signal.tensor(jnp.einsum("bsd,dnh->bsnh", x, weights[name]), name) for name in "qkv")
            heads = signal.tensor(attended(kind, q, k, v, documents, weights.get("sinks")), "heads")
        return jnp.sin(jnp.einsum("bsnh,nhd->bsd", heads, weights["out"]))

    def loss(params, batch):
        x, documents = batch["x"], batch["documents"]
        if not layers:
            return jnp.mean((layer(x, params, documents) - x) ** 2)
        with signal.context("layers"):
            run = jax.checkpoint(layer) if remat else layer
            x, _ = jax.lax.scan(lambda x, weights: (x + run(x, weights, documents), None), x, params)
        return jnp.mean((x - batch["x"]) ** 2)

    rng = np.random.default_rng(0)

    def make(*shape):
        return (rng.standard_normal(shape) * 0.3).astype(np.float32)

    lead = (layers,) if layers else ()
    params = {"q": make(*lead, D, N, H), "k": make(*lead, D, G, H), "v": make(*lead, D, G, H), "out": make(*lead, N, H, D)}
    params |= {"sinks": make(*lead, N) * 5} if kind == "sinks" else {}
    batch = {"x": make(B, seq, D) * 2, "documents": np.sort(rng.integers(0, 4, (B, seq)), -1).astype(np.int32)}
    return loss, params, batch


def rules(method, order=None, **more):
    signals = {"**/attn": {"context": {"axis": "seq", "method": method, **({"order": order} if order else {}), **more}}}
    return {"axes": {"batch": ["data"]}, "inputs": ["batch", "seq", "..."], "signals": signals, "default": "replicate"}


def differences(fn, rules, mesh, params, batch, *, arrives=lambda x: x, **more):
    """The largest error of the value and of each gradient, in parts of the largest number. arrives: brings rows into order."""
    want = jax.jit(jax.value_and_grad(fn))(params, batch)
    got = jax.jit(jax.value_and_grad(jgt.shard(fn, rules, mesh, **more)))(params, jax.tree.map(arrives, batch))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


GRID = [
    (method, order, kind, n)
    for n in (2, 4, 8)
    for kind in ("causal", "full", "window", "packed")
    for method, order in (("ring", None), ("ring", "plain"), ("gather", None), ("gather", "zigzag"), ("ulysses", None))
    if not (order == "zigzag" and kind == "full") and not (method == "ulysses" and n == 8)
]
QUICK = {("ring", None, "causal", 4), ("ulysses", None, "packed", 4)}


@pytest.mark.parametrize(
    ("method", "order", "kind", "n"), [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in GRID]
)
def test_values_and_gradients_are_those_of_one_device(method, order, kind, n):
    fn, params, batch = make_loss(kind)
    assert differences(fn, rules(method, order), jgt.make_mesh({"data": 8 // n, "seq": n}), params, batch) < 2e-6


SINKS = [("ring", None), ("ring", "plain"), ("gather", None), ("gather", "zigzag"), ("ulysses", None)]


@pytest.mark.parametrize(
    ("method", "order"), [pytest.param(*one, marks=[] if one == ("ulysses", None) else pytest.mark.slow) for one in SINKS]
)
def test_a_sink_and_its_gradient(method, order):
    fn, params, batch = make_loss("sinks")
    assert differences(fn, rules(method, order), jgt.make_mesh({"data": 2, "seq": 4}), params, batch) < 2e-6


def in_zigzag(n):
    parts = [part for i in range(n) for part in (i, 2 * n - 1 - i)]
    return lambda x: np.concatenate([np.split(x, 2 * n, axis=1)[part] for part in parts], axis=1)


ROWS = [(method, kind, n) for n in (2, 4, 8) for method in ("ring", "gather") for kind in ("causal", "full", "window", "packed", "sinks")]


@pytest.mark.parametrize(
    ("method", "kind", "n"), [pytest.param(*one, marks=[] if one == ("ring", "packed", 4) else pytest.mark.slow) for one in ROWS]
)
def test_rows_that_arrive_in_zigzag_order(method, kind, n):
    fn, params, batch = make_loss(kind)
    mesh = jgt.make_mesh({"data": 8 // n, "seq": n})
    assert differences(fn, rules(method, "zigzag_rows"), mesh, params, batch, arrives=in_zigzag(n)) < 2e-6


@pytest.mark.parametrize(
    "method", [pytest.param("ring", marks=pytest.mark.slow), "gather", pytest.param("ulysses", marks=pytest.mark.slow)]
)
def test_layers_in_a_loop_that_are_recomputed(method):
    fn, params, batch = make_loss(layers=2)
    assert differences(fn, rules(method), jgt.make_mesh({"data": 2, "seq": 4}), params, batch) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_layers_in_stages(method, schedule):
    fn, params, batch = make_loss(layers=2)
    pipeline = jgt.Pipeline(signal="layers", microbatches=2, schedule=schedule)
    mesh = jgt.make_mesh({"data": 2, "stage": 2, "seq": 2})
    assert differences(fn, rules(method), mesh, params, batch, pipeline=pipeline) < 2e-6


@pytest.mark.parametrize("method", [pytest.param("ring", marks=pytest.mark.slow), "ulysses"])
def test_heads_that_another_axis_splits(method):
    fn, params, batch = make_loss("packed")
    given = rules(method)
    given["signals"]["**/attn"]["tensors"] = {"{q,k,v,heads}": ["batch", "seq", "tensor", None]}
    assert differences(fn, given, jgt.make_mesh({"data": 2, "seq": 2, "tensor": 2}), params, batch) < 2e-6


FORMULAS = {
    # Forward and backward, from the number of devices and the bytes of a device's q and of its k. Gradients of k are f32, as k is here.
    ("gather", "plain"): lambda n, q, k: 2 * (n - 1) * k * 3,
    ("ring", "plain"): lambda n, q, k: 2 * (n - 1) * k * 2 + 2 * n * k,
    ("ring", "zigzag"): lambda n, q, k: 2 * (n - 1) * k * 2 + 2 * n * k + 2 * (2 * q + 2 * k),
    ("ring", "zigzag_rows"): lambda n, q, k: 2 * (n - 1) * k * 2 + 2 * n * k,
    ("ulysses", None): lambda n, q, k: 2 * (2 * q + 2 * k) * (n - 1) // n,
}


@pytest.mark.parametrize(
    ("method", "order"), [pytest.param(*one, marks=[] if one == ("ulysses", None) else pytest.mark.slow) for one in FORMULAS]
)
def test_each_method_sends_the_bytes_of_its_formula(method, order):
    # In a loop over layers, because XLA would merge what the backward pass of one layer sends with what its forward pass has sent.
    n, layers = 4, 3
    fn, params, batch = make_loss(layers=layers, remat=False)
    sharded = jgt.shard(fn, rules(method, order), jgt.make_mesh({"data": 8 // n, "seq": n}))
    plan = jgt.plan(jax.jit(jax.grad(lambda x: sharded(params, {**batch, "x": x}))), batch["x"])
    rows = B // (8 // n) * S // n
    total = sum(one.total_bytes for one in plan.collectives if one.signal == "layers/attn")
    assert total == layers * FORMULAS[method, order](n, 4 * rows * N * H, 4 * rows * G * H)


@pytest.mark.slow
def test_a_window_shortens_the_ring():
    mesh, given = jgt.make_mesh({"seq": 8}), {**rules("ring"), "axes": {"batch": []}, "inputs": [None, "seq", "..."]}

    def sent(kind):
        fn, params, batch = make_loss(kind)
        sharded = jgt.shard(fn, given, mesh)
        plan = jgt.plan(jax.jit(lambda x: sharded(params, {**batch, "x": x})), batch["x"])
        return sum(one.total_bytes for one in plan.collectives if one.kind == "collective-permute")

    # A part has 32 positions and a query sees 80: its own part, and those of three devices before it.
    rows = 4 * B * S // 8
    assert sent("window") == 2 * 3 * rows * G * H
    assert sent("causal") == 2 * 7 * rows * G * H + 2 * rows * (N + G) * H


# -- what is refused -------------------------------------------------------------------------------------------------


def refused(given, mesh, fn, params, batch):
    with pytest.raises(InputError) as error:
        jax.eval_shape(jgt.shard(fn, given, jgt.make_mesh(mesh)), params, batch)
    return str(error.value)


@pytest.mark.parametrize(
    ("method", "order", "seq", "mesh", "message"),
    [
        ("ring", None, 36, {"seq": 8}, r"a sequence of 36 does not divide by 8\. Take 32 or 40"),
        ("ring", None, 40, {"seq": 8}, r"does not divide by 16 \(zigzag order: twice the axis\)\. Take 32 or 48, or write order: plain"),
        ("ulysses", None, S, {"seq": 8}, r"4 key heads do not divide by 8, as ulysses over seq=8 needs it\. Sizes that fit: 1, 2, 4"),
    ],
)
def test_sizes_that_do_not_fit(method, order, seq, mesh, message):
    fn, params, batch = make_loss(seq=seq)
    given = {**rules(method, order), "axes": {"batch": []}, "inputs": [None, "seq", "..."]}
    with pytest.raises(InputError, match=message):
        jax.eval_shape(jgt.shard(fn, given, jgt.make_mesh(mesh)), params, batch)


@pytest.mark.parametrize(
    ("method", "kind", "why"),
    [
        ("ulysses", "causal", "in ulysses each device has the whole sequence. Use ring or gather"),
        ("ring", "both ways", "the attention is neither causal nor without a mask"),
        ("gather", "given", "a mask of all pairs is made outside of the attention"),
    ],
)
def test_attention_for_which_rows_have_to_be_in_order(method, kind, why):
    def fn(params, batch):
        distance = jnp.abs(jnp.arange(S)[:, None] - jnp.arange(S)[None])
        mask = {"both ways": (distance < 9)[None, None], "given": batch["mask"], "causal": (distance < S)[None, None]}[kind]
        with signal.context("attn"):
            q, k, v = (signal.tensor(jnp.einsum("bsd,dnh->bsnh", batch["x"], params[name]), name) for name in "qkv")
            heads = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=kind != "both ways")
            return jnp.mean(signal.tensor(heads, "heads"))

    _, params, batch = make_loss()
    given = {**rules(method, "zigzag_rows"), "inputs": {"mask": ["..."], "*": ["batch", "seq", "..."]}}
    batch["mask"] = np.ones((1, 1, S, S), bool)
    assert why in refused(given, {"data": 2, "seq": 4}, fn, params, batch)


def test_names_that_are_missing_or_wrong():
    fn, params, batch = make_loss()
    message = refused(rules("ring", between=["q", "k", "v", "result"]), {"data": 2, "seq": 4}, fn, params, batch)
    assert "no program at this signal or below it has the tensors q, k, v, result" in message
    with pytest.raises(InputError, match="a list of four names: of q, k, v and of the attention's result"):
        jgt.make_rules(rules("ring", between=["q", "k"]))


def test_an_axis_of_the_batch():
    fn, params, batch = make_loss()
    given = {**rules("ring"), "inputs": [["data", "seq"], "..."]}
    assert "seq splits the batch already" in refused(given, {"data": 2, "seq": 4}, fn, params, batch)


def test_a_spec_that_makes_the_sequence_whole():
    fn, params, batch = make_loss()
    given = rules("ring")
    given["signals"]["**/attn"]["tensors"] = {"{q,k,v,heads}": ["batch", None, None, None]}
    assert "splits the sequence of q over seq. Write [data, seq, null, null]" in refused(given, {"data": 2, "seq": 4}, fn, params, batch)


def test_attention_that_is_something_else_names_its_line():
    def fn(params, batch):
        with signal.context("attn"):
            q, k, v = (signal.tensor(jnp.einsum("bsd,dnh->bsnh", batch["x"], params[name]), name) for name in "qkv")
            return jnp.mean(signal.tensor(XLA.attend(q, k, v, softcap=20.0), "heads"))

    _, params, batch = make_loss()
    message = refused(rules("ring"), {"data": 2, "seq": 4}, fn, params, batch)
    assert "is not attention that can be split along the sequence: it is not softmax(scale · q · k) · v" in message


def test_a_value_that_is_read_outside():
    def fn(params, batch):
        with signal.context("attn"):
            q, k, v = (signal.tensor(jnp.einsum("bsd,dnh->bsnh", batch["x"], params[name]), name) for name in "qkv")
            k, v = (jnp.repeat(x, N // G, 2) for x in (k, v))
            weights = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k), -1)
            heads = signal.tensor(jnp.einsum("bnqk,bknh->bqnh", weights, v), "heads")
            return jnp.mean(heads) + jnp.max(weights)

    _, params, batch = make_loss()
    message = refused(rules("ring"), {"data": 2, "seq": 4}, fn, params, batch)
    assert "a value is made that" in message and "reads, too. It would be one of the whole sequence" in message
