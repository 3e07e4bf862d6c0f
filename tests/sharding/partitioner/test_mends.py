"""What XLA computes wrongly whatever its layout, class by class: values and gradients through `jgt.shard` are those of the plain function.

Where the first assertion of a class fails with a new XLA, the class is mended there: take it out of jgt/sharding/partitioner/mends.py.
"""

import os
import subprocess
import sys
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plugin import needs_plugin

import jgt
from jgt.planner.compiled import compile_function
from jgt.planner.hardware.target import Target
from jgt.sharding.partitioner import avoided_faults, with_faults

ROWS = 16
OLD = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 12)
FAR = (-20, -17, -1, 0, 3, 12, 13, 15, 16, 40)
"""Starts along the rows: far before, wrapped, inside, the last ones that fit windows of four and of one, and beyond."""


def one_row(change):
    return lambda h, k: jgt.signal.tensor(change(h), "t")


def sliced(size):
    return lambda h, k: jgt.signal.tensor(lax.dynamic_slice_in_dim(h, k, size, 0), "t")


def updated(size):
    return lambda h, k: jgt.signal.tensor(lax.dynamic_update_slice_in_dim(h, h[:size] * 2 + 1, k, 0), "t")


def in_a_loop(h, k):
    return lax.scan(lambda c, i: (lax.dynamic_update_slice_in_dim(c, h[:2], i * 3, 0), None), h, jnp.arange(8))[0]


SHIFTED = {
    "shift and fill": lambda h: h.at[:-1].set(h[1:]).at[-1].set(0.0),
    "fill the first": lambda h: h.at[1:].set(h[:-1]).at[0].add(2.0),
    "a row of a concatenation": lambda h: jnp.concatenate([h[1:], h[:1]]).at[-1].set(0.0),
    "a row of a sorted array": lambda h: jnp.sort(h, 0).at[3].multiply(2.0),
    "a row of a roll": lambda h: jnp.roll(h, (h[0, 0] > 0).astype(int) + 3, 0).at[-1].set(0.0),
    "each column apart": lambda h: jax.vmap(lambda c: c.at[:-1].set(c[1:]).at[-1].set(0.0), 1, 1)(h),
    "three steps of a stencil": lambda h: lax.fori_loop(
        0, 3, lambda _, h: h.at[1:-1].add(0.1 * (h[2:] - 2 * h[1:-1] + h[:-2])).at[0].set(1.0).at[-1].set(0.0), h
    ),
}
# By name: a function of the rows [ROWS, 8] and a start, and whether it is wrong in this version of XLA for some start.
CLASSES = {name: (one_row(change), OLD if name in ("shift and fill", "a row of a roll") else None) for name, change in SHIFTED.items()} | {
    "a slice": (sliced(4), OLD),
    "a slice of one row": (lambda h, k: h[k], True),
    "an update": (updated(4), OLD),
    "an update of one row": (updated(1), True),
    "updates in a loop": (in_a_loop, None),
}


def losses(fn):
    """The loss of a function of rows under rules that split these, and the plain loss."""

    def loss(params, x, k):
        with jgt.signal.context("m"):
            out = fn(jgt.signal.tensor(jnp.tanh(x @ params["w"]), "h"), k)
        return jnp.sum(out**2 * jnp.arange(1.0, 1 + out.size).reshape(out.shape)) / out.size

    rules = {"axes": {"batch": ["data"]}, "signals": {"m": {"tensors": {"h": ["data", None], "t": ["data", None]}}}, "default": "replicate"}
    return jgt.shard(loss, jgt.make_rules(rules), jgt.make_mesh({"data": 4, "tensor": 2}), partial=True), loss


def arrays():
    draw = np.random.default_rng(0)
    return {"w": jnp.asarray(draw.standard_normal((8, 8), np.float32))}, jnp.asarray(draw.standard_normal((ROWS, 8), np.float32))


def errors(fn, starts):
    """The largest error of a loss and of its gradient, by start, as a share of the largest number."""
    sharded, plain = losses(fn)
    step, (params, x), found = jax.jit(jax.value_and_grad(sharded)), arrays(), {}
    for k in map(jnp.int32, starts):
        # Operation by operation: XLA may compute a whole program wrongly on one device, too.
        expected = jax.value_and_grad(plain)(params, x, k)
        pairs = zip(jax.tree.leaves(step(params, x, k)), jax.tree.leaves(expected), strict=True)
        found[int(k)] = max(float(jnp.max(jnp.abs(a - b)) / (jnp.max(jnp.abs(b)) + 1e-6)) for a, b in pairs)
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_xla_still_computes_this_wrongly_and_jgt_does_not(name):
    fn, is_wrong = CLASSES[name]
    starts = FAR if name.startswith(("a slice", "an update")) else (0,)
    if is_wrong is not None:
        with with_faults():
            assert (max(errors(fn, starts).values()) > 1e-2) is is_wrong
    with avoided_faults() as avoided:
        assert max(errors(fn, starts).values()) < 1e-5
    assert avoided or not is_wrong


def test_a_shift_along_columns_of_which_each_device_has_one():
    def shift(p, x):
        h = jgt.signal.tensor(jnp.tanh(x * p[None]), "h")
        return h.at[:, 1:].set(h[:, :-1]).at[:, 0].add(2.0)

    def with_signal(p, x):
        with jgt.signal.context("m"):
            return shift(p, x)

    rules = {"signals": {"m": {"tensors": {"h": [None, ["data", "tensor"]]}, "out": ["data", "tensor"]}}, "default": "replicate"}
    mesh, x = jgt.make_mesh({"data": 4, "tensor": 2}), jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, 8), np.float32))

    def error():
        sharded = jgt.shard(lambda p, x: with_signal(p, x), jgt.make_rules(rules), mesh, partial=True)
        return float(jnp.max(jnp.abs(jax.jit(sharded)(jnp.ones(8), x) - shift(jnp.ones(8), x))))

    with with_faults():
        assert error() > 0.1
    assert error() < 1e-5


RANDOM = np.random.default_rng(0)
BOARD = jnp.asarray(RANDOM.permutation(64).reshape(8, 8), jnp.float32)
UPDATES = {
    "a shift": lambda v: v.at[1:].set(v[:-1]),
    "a shift of the slice": lambda v: lax.dynamic_update_slice(v, 2 * v[:-1], (1, 0)),
    "a shift that is added": lambda v: v.at[1:].add(v[:-1]),
    "a shift with a row of its own": lambda v: v.at[1:].set(v[:-1]).at[0].set(1.0),
    "a shift of what is computed twice": None,
}


def laid_out(fn, layouts, *args, axes=4):
    """A function of an array and of constraints on it, through `jgt.shard` with these layouts one after another, and plainly."""
    mesh = jax.make_mesh((2,) * axes, tuple("abcd"[:axes]), axis_types=(AxisType.Auto,) * axes, devices=jax.devices()[: 2**axes])

    def with_layouts(p, *args):
        return fn(lambda x, n: lax.with_sharding_constraint(x, NamedSharding(mesh, P(*layouts[n]))), p, *args)

    rules = jgt.make_rules({"inputs": {}, "default": "replicate"})
    return jax.jit(jgt.shard(with_layouts, rules, mesh, own="keep"))(*args), fn(lambda x, n: x, *args)


@pytest.mark.parametrize("name", UPDATES)
def test_an_array_that_is_updated_with_a_part_of_itself(name):
    def moved_and_updated(place, x):
        x = place(x, 0)
        # XLA computes the two once.
        return place(2 * x, 1).at[1:].set(place(2 * x, 1)[:-1]) if UPDATES[name] is None else UPDATES[name](place(2 * x, 1))

    layouts = ("b", "a"), (None, ("a", "c"))
    with with_faults():
        found, right = laid_out(moved_and_updated, layouts, BOARD, axes=3)
    assert name == "a shift that is added" or not np.array_equal(found, right)
    np.testing.assert_array_equal(*laid_out(moved_and_updated, layouts, BOARD, axes=3))


@pytest.mark.parametrize(
    ("starts", "indices"), [((7, 0, 6, 3), (0, 1, 2, 3)), ((0, 7, 8, 9), (1, 0, 5, -1)), ((-1, -8, -9, 20), (7, 8, 9, -9))]
)
@pytest.mark.parametrize("of_result", [None, ("a", "b")])
def test_an_index_outside_of_a_window(starts, indices, of_result):
    def row_of_a_window(place, x, starts, indices):
        windows = jax.vmap(lambda row, i: lax.dynamic_slice_in_dim(row, i, 2))(place(x, 0), starts)
        return place(jax.vmap(lambda window, i: window[i])(windows, indices), 1)

    args = BOARD[:4], jnp.asarray(starts), jnp.asarray(indices)
    np.testing.assert_array_equal(*laid_out(row_of_a_window, ((("a", "b"), None), (of_result,)), *args, axes=2))


SIXTEEN = (
    "import jax, jax.numpy as jnp, numpy as np, jgt",
    "from jax.sharding import NamedSharding, PartitionSpec as P",
    "mesh = jgt.make_mesh(dict.fromkeys('abcd', 2))",
    "table, ids = jnp.arange(32.0 * 12).reshape(32, 12), jnp.asarray([0, 31, 30, 4, 1, 5, 17, 8])",
    "def lookup(place, table, ids):",
    "    return place(place(table, 0)[ids], 1)",
    "rules = jgt.make_rules({'inputs': {}, 'default': 'replicate'})",
    "tables = (('b', 'd'), 'c'), ('b', None), (('d', 'b'), None), (('a', 'b'), None)",
    "for layouts in zip(tables, (('a', 'c'), (('b', 'd'), 'c'), ('a', 'c'), (('b', 'a'), 'c'))):",
    "    place = lambda x, n: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*layouts[n])))",
    "    sharded = jgt.shard(lambda *args: lookup(place, *args), rules, mesh, own='keep')",
    "    np.testing.assert_array_equal(jax.jit(sharded)(table, ids), table[ids], str(layouts))",
    "mesh = jgt.make_mesh({'a': 4, 'b': 2, 'c': 2})",
    "layouts = (None, 'a', 'c', 'b'), (None, None, 'c', ('b', 'a')), ('c', 'b')",
    "x, w = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (2, 8, 8, 4, 8)), jnp.float32)",
    "of_sums = lambda place, x, w: place(jnp.einsum('abck,abcn->kn', place(x, 0), place(w, 1)), 2)",
    "sharded = jgt.shard(lambda *args: of_sums(place, *args), rules, mesh, own='keep')",
    "np.testing.assert_array_equal(jax.jit(sharded)(x, w), of_sums(lambda x, n: x, x, w))",
)


@pytest.mark.slow
def test_lookups_on_four_axes_and_a_matmul_with_three_sums():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
    subprocess.run([sys.executable, "-c", "\n".join(SIXTEEN)], check=True, env=env, timeout=120)


NANS = {
    "max": lambda x: jnp.max(x, 0),
    "min": lambda x: jnp.min(x, 0),
    "of all": lambda x: jnp.max(x, keepdims=True),
    "of half precision": lambda x: jnp.max(x.astype(jnp.bfloat16), 0).astype(jnp.float32),
    "segments": lambda x: jax.ops.segment_max(x, jnp.arange(ROWS) % 3, 4),
    "smallest of segments": lambda x: jax.ops.segment_min(x, jnp.arange(ROWS) % 3, 4),
    "an update of rows": lambda x: jnp.zeros((4, 8)).at[jnp.arange(ROWS) % 3].max(x),
}


@pytest.mark.parametrize("name", NANS)
@pytest.mark.parametrize("place", [None, (13, 2), (0, 7)])
def test_a_nan_survives_the_extremes_of_split_rows(name, place):
    _, x = arrays()
    x = x if place is None else x.at[place].set(jnp.nan)
    rules, mesh = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"}), jgt.make_mesh({"data": 4, "tensor": 2})
    sharded = jax.jit(jgt.shard(lambda p, x: NANS[name](x * p[None]), rules, mesh))
    if place == (13, 2):
        with with_faults():
            jax.clear_caches()
            assert not np.array_equal(sharded(jnp.ones(8), x), NANS[name](x), equal_nan=True)
            jax.clear_caches()
    assert np.array_equal(sharded(jnp.ones(8), x), NANS[name](x), equal_nan=True)


def normalized(x, axis):
    return jnp.exp(x - jnp.max(x, axis, keepdims=True)) / jnp.sum(x, axis, keepdims=True)


def test_a_nan_survives_where_the_indices_alone_are_split():
    rules = {"inputs": {"k": ["data"]}, "signals": {"m": {"tensors": {"x": [None, "data"], "out": [None, None]}}}, "default": "replicate"}

    def smallest(x, k):
        with jgt.signal.context("m"):
            return jgt.signal.tensor(jnp.ones_like(x).at[:, k].min(jgt.signal.tensor(x, "x")), "out")

    x, k = arrays()[1].at[3, 5].set(jnp.nan), jnp.arange(8)
    sharded = jax.jit(jgt.shard(smallest, jgt.make_rules(rules), jgt.make_mesh({"data": 8})))
    assert np.array_equal(sharded(x, k), smallest(x, k), equal_nan=True)


def test_an_argument_without_a_rule_has_the_layout_that_shardy_gives_it():
    rules = {"signals": {"m": {"tensors": {"x": ["data"]}}}, "inputs": {}, "default": "replicate"}

    def largest(params, batch):
        with jgt.signal.context("m"):
            return jgt.signal.tensor(params["x"], "x") < batch["y"], jnp.max(batch["y"]) + batch["y"]

    args = {"x": jnp.zeros(8)}, {"y": jnp.arange(8.0).at[5].set(jnp.nan)}
    sharded = jax.jit(jgt.shard(largest, jgt.make_rules(rules), jgt.make_mesh({"data": 8})))
    assert np.array_equal(sharded(*args)[1], largest(*args)[1], equal_nan=True)


def test_layouts_pass_through_functions_that_shardy_does_not_know():
    """A square is one. The rows behind it are split because the result is."""
    rules = {"signals": {"m": {"tensors": {"out": ["data"]}}}, "inputs": {}, "default": "replicate"}

    def loss(params, x, k):
        with jgt.signal.context("m"):
            return jgt.signal.tensor(jnp.square(lax.dynamic_update_slice_in_dim(x, 5 + x[:1], k, 0)).sum(1), "out")

    sharded = jax.jit(jgt.shard(loss, jgt.make_rules(rules), jgt.make_mesh({"data": 8})))
    with avoided_faults() as avoided:
        for k in FAR:
            args = {}, arrays()[1], jnp.int32(k)
            assert jnp.allclose(sharded(*args), loss(*args))
    assert avoided


BEHIND = {
    "softmax": (jax.nn.softmax, False),
    "log_softmax": (jax.nn.log_softmax, False),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, -1), False),
    "a gradient": (jax.grad(lambda x: jnp.sum(jax.nn.logsumexp(x, -1) * jnp.arange(1.0, 17))), False),
    "a share of the sum": (lambda x: normalized(x, -1), False),
    "without a sum": (lambda x: x - jnp.max(x, -1, keepdims=True), True),
    "a sum of others": (lambda x: x - jnp.max(x, -1, keepdims=True) + jnp.sum(x, 0, keepdims=True), True),
    "a sum that is turned": (lambda x: jnp.max(x, -1)[:, None] + jnp.sum(x, -1)[None, :], True),
    "a maximum that is turned": (lambda x: jnp.max(x, -1)[None, :] + jnp.sum(x, -1)[:, None], True),
    "a choice": (lambda x: jnp.where(jnp.max(x, -1, keepdims=True) > 0, x, jnp.sum(x, -1, keepdims=True)), True),
    "a masked sum": (lambda x: jnp.max(x, -1) + jnp.sum(jnp.where(x > 0, x, 0), -1), True),
    "a comparison": (lambda x: jnp.max(x, -1, keepdims=True) == x, True),
    "an integer": (lambda x: (jnp.sum(x, -1) + jnp.max(x, -1)).astype(int), False),
}


@pytest.mark.parametrize("name", BEHIND)
def test_a_maximum_has_flags_only_where_its_nan_would_be_seen(name):
    fn, has_flags = BEHIND[name]
    rules = jgt.make_rules({"signals": {"m": {"tensors": {"x": [None, "data"]}}}, "default": "replicate", "inputs": []})

    def named(_, x):
        with jgt.signal.context("m"):
            return fn(jgt.signal.tensor(x, "x"))

    sharded = jax.jit(jgt.shard(named, rules, jgt.make_mesh({"data": 8})))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16), np.float32))
    with avoided_faults() as avoided:
        for place in ((0, 0), (3, 15), (9, 4)):
            spoiled = x.at[place].set(jnp.nan)
            assert np.allclose(sharded({}, spoiled), jax.jit(fn)(spoiled), rtol=1e-4, equal_nan=True)
    assert has_flags is any("flags" in one.after for one in avoided)


def test_a_result_that_only_a_constraint_reads_has_its_layout():
    rules = {"signals": {"m": {"tensors": {"x": ["data", None], "row": [["tensor", "data"]]}}}, "default": "replicate", "inputs": []}

    def loss(x, k):
        with jgt.signal.context("m"):
            return jnp.sum(jgt.signal.tensor(jgt.signal.tensor(x, "x")[k], "row") * jnp.arange(8.0))

    step = jax.jit(jax.grad(jgt.shard(loss, jgt.make_rules(rules), jgt.make_mesh({"data": 4, "tensor": 2}))))
    _, x = arrays()
    for k in FAR:
        assert jnp.array_equal(step(x, jnp.int32(k)), jax.grad(loss)(x, jnp.int32(k)))


REPEATED = {
    "flipped": lambda h, split: jnp.flip(jnp.broadcast_to(h, (2, *h.shape))[0], 0),
    "flipped after a tile": lambda h, split: jnp.flip(jnp.tile(h[None], (3, 1, 1))[1], 0),
    "flipped after an operation": lambda h, split: jnp.flip(jnp.tanh(jnp.broadcast_to(h, (2, *h.shape))[0]), 0),
    "permuted": lambda h, split: split(jnp.broadcast_to(h, (2, *h.shape))[0]) * 2,
}


@pytest.mark.parametrize("name", REPEATED)
def test_one_row_on_each_device_is_not_taken_for_a_broadcast(name):
    out = [["tensor", "data"] if name == "permuted" else ["data", "tensor"], None]
    rules = {"signals": {"m": {"tensors": {"out": out, "*": [["data", "tensor"], None]}}}, "default": "replicate", "inputs": []}
    mesh = jgt.make_mesh({"data": 2, "tensor": 4})

    def loss(params, x):
        with jgt.signal.context("m"):
            h = jgt.signal.tensor(x @ params["w"], "h")
            out = REPEATED[name](h, lambda x: jgt.signal.tensor(x, "split"))
            return jnp.sum(jgt.signal.tensor(out, "out") * jnp.arange(64.0).reshape(8, 8))

    def errors():
        step = jax.jit(jax.value_and_grad(jgt.shard(loss, jgt.make_rules(rules), mesh)))
        pairs = zip(jax.tree.leaves(step(params, x)), jax.tree.leaves(jax.value_and_grad(loss)(params, x)), strict=True)
        return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)

    params, x = arrays()
    x = x[:8]
    with with_faults():
        assert errors() > 1e-2
    assert errors() < 1e-5


def cut_windows(x, k):
    window = jgt.signal.tensor(lax.dynamic_slice_in_dim(x, k, 4, 1), "whole")
    return jgt.signal.tensor(window[:6] + window[2:], "columns")


def windows_of_rows(x, k):
    return jgt.signal.tensor(jax.vmap(lambda row: lax.dynamic_slice_in_dim(row, k, 2))(x[:4]), "both")


def row_of_an_update(x, k):
    column = jgt.signal.tensor(x[:2, 0], "split")
    return lax.dynamic_slice_in_dim(x[:2, 1].at[1:].min(column[1:]), k, 1, 0)


# By name: a function of an array that is whole, [8, 8], and of a start, whether it is wrong, and the starts for which it is.
CUT = {
    "a window of which a reader needs a part": (cut_windows, OLD),
    "a window of each row": (windows_of_rows, OLD),
    "an update of which a reader needs a part": (row_of_an_update, True),
}


@pytest.mark.parametrize("name", CUT)
def test_a_start_outside_of_a_whole_dim_of_which_a_reader_needs_a_part(name):
    fn, is_wrong = CUT[name]

    def loss(x, k):
        with jgt.signal.context("m"):
            out = fn(x, k)
        return jnp.sum(out * jnp.arange(1.0, 1 + out.size).reshape(out.shape))

    specs = {"whole": [None, None], "columns": [None, "cut"], "both": ["rows", "cut"], "split": ["cut"]}
    rules = jgt.make_rules({"signals": {"m": {"tensors": specs}}, "default": "replicate", "inputs": []})
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8), np.float32))

    def error():
        step = jax.jit(jax.value_and_grad(jgt.shard(loss, rules, jgt.make_mesh({"rows": 4, "cut": 2}), partial=True)))
        pairs = [(step(x, k), jax.value_and_grad(loss)(x, k)) for k in map(jnp.int32, (-20, -1, 0, 3, 7, 20))]
        leaves = [zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True) for found, right in pairs]
        return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for each in leaves for a, b in each)

    with with_faults():
        assert (error() > 1e-2) is is_wrong
    assert error() < 1e-5


def test_starts_that_fit_and_whole_windows_are_left_alone():
    def loss(params, x):
        h = x @ params["w"]
        return jnp.sum(lax.dynamic_slice(h, (0, (h[0, 0] > 0).astype(int)), (ROWS, 8)) * lax.dynamic_slice_in_dim(h, 3, 4, 0).sum())

    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"})
    with avoided_faults() as avoided:
        jax.jit(jax.grad(jgt.shard(loss, rules, jgt.make_mesh({"data": 4, "tensor": 2}))))(*arrays())
    assert not avoided


@needs_plugin
def test_a_plan_for_gpus_has_the_clamp_and_reports_nothing():
    def step(params, x, k):
        with jgt.signal.context("m"):
            h = jgt.signal.tensor(x @ params["w"], "h")
            h = h.at[:-1].set(h[1:]).at[-1].set(0.0)
            return jnp.sum(jgt.signal.tensor(lax.dynamic_slice_in_dim(h, k, 4, 0), "t") ** 2) + jnp.max(h)

    rules = jgt.make_rules({"signals": {"m": {"tensors": {"*": ["data", None]}}}, "default": "replicate", "inputs": []})
    shapes = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}, jax.ShapeDtypeStruct((ROWS, 8), "float32"), jax.ShapeDtypeStruct((), "int32")
    compiled = compile_function(jax.jit(jgt.shard(step, rules, jgt.abstract_mesh({"data": 2}))), shapes, Target.parse("h100:1x2"))
    assert [avoided.after for avoided in compiled.avoided] == ["a start that is clamped first"]
    assert not [
        finding
        for finding in jgt.plan(jax.jit(jgt.shard(step, rules, jgt.abstract_mesh({"data": 2}))), *shapes, target="h100:1x2").findings
        if finding.kind == "avoided"
    ]


COMPILER = """
import jax, jax.numpy as jnp
from jax._src import compiler
before = compiler.compile_or_get_cached
import jgt
loss = jgt.shard(lambda p, x: (p * x).sum(), {"axes": {"batch": ["data"]}, "default": "replicate"}, jgt.make_mesh({"data": 2}))
print(compiler.compile_or_get_cached is before)
jax.jit(loss)(jnp.ones(()), jnp.ones(4))
print(compiler.compile_or_get_cached is before)
"""


@pytest.mark.parametrize(("switch", "expected"), [("1", ["True", "False"]), ("0", ["True", "True"])])
def test_jax_stays_as_it_is_until_a_function_is_called_and_with_the_switch_for_ever(switch, expected):
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JGT_AVOID_FAULTS": switch}
    done = subprocess.run([sys.executable, "-c", COMPILER], check=True, capture_output=True, text=True, env=os.environ | flags, timeout=120)
    assert done.stdout.split() == expected


def test_programs_that_no_rules_have_rewritten_are_left_to_xla():
    mesh = jgt.make_mesh({"data": 4, "tensor": 2})
    split = NamedSharding(mesh, P("data"))
    jax.jit(losses(CLASSES["a slice"][0])[0])(*arrays(), 0)
    with avoided_faults() as avoided:
        own = jax.jit(lambda x, k: lax.dynamic_slice_in_dim(x, k, 4, 0), in_shardings=(split, None), out_shardings=split)
        jax.block_until_ready(own(jnp.arange(16.0), 20))
    assert not avoided
