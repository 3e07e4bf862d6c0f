"""`jgt.verify_jit` finds what a layout changes in a jitted function, names the operation, and has nothing to say about right programs."""

import functools
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jgt
from jgt.api.draws import draws
from jgt.api.reference import Reference
from jgt.program import scopes
from jgt.program.tracing import trace
from jgt.sharding.partitioner import avoid_faults, with_faults

ROWS, COLS = 16, 8
MESH = jgt.make_mesh({"data": 4, "tensor": 2})


def split(x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def draw(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


X, W = draw((ROWS, COLS), 0), draw((COLS, COLS), 1)
START = jax.ShapeDtypeStruct((), jnp.int32)


def put_behind_the_end(w, x, start):
    h = jnp.tanh(split(x, "data") @ w)
    return jnp.mean(lax.dynamic_update_slice(h, h[:1] * 5, (start, 0)) ** 2)  # LINE


def put_in_a_loop(w, x, start):
    def layer(h, w):
        h = jnp.tanh(split(h, "data") @ w)
        return lax.dynamic_update_slice(h, h[:1] * 5, (start, 0)), None  # LINE

    return jnp.mean(lax.scan(layer, x, jnp.stack([w, w / 2]))[0] ** 2)


def read_behind_the_end(w, x, start):
    # The value is right. XLA loses the update that is its gradient.
    return jnp.sum(lax.dynamic_index_in_dim(jnp.tanh(split(x, "data") @ w), start, 0) ** 2)  # LINE


@pytest.mark.parametrize(
    ("fn", "operation"),
    [
        (put_behind_the_end, "the value of dynamic_update_slice"),
        (put_in_a_loop, "the value of dynamic_update_slice"),
        (read_behind_the_end, "the cotangent of"),
    ],
)
def test_the_first_operation_that_differs_is_named_with_its_line(fn, operation):
    """Only numbers drawn at the ends of what they choose show these faults (openxla/xla#49118)."""
    with with_faults():
        found = jgt.verify_jit(fn, W, X, START)
    assert not found.is_right
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    line = next(n for n, line in lines if "# LINE" in line and n > fn.__code__.co_firstlineno)
    assert operation in found.first
    assert f"{__name__.rpartition('.')[2]}.py:{line}" in found.first
    assert ("step 0 of its loop" in found.first) == (fn is put_in_a_loop)


def test_a_start_that_is_given_stays():
    with with_faults():
        assert jgt.verify_jit(put_behind_the_end, W, X, jnp.int32(3)).is_right
        assert not jgt.verify_jit(put_behind_the_end, W, X, jnp.int32(ROWS)).is_right


def test_shardings_of_arguments_and_of_a_jit_are_those_that_run():
    """The fault shows only if the rows are split, whichever way says so."""
    rows, whole = NamedSharding(MESH, P("data")), NamedSharding(MESH, P())

    def put(x, start):
        return lax.dynamic_update_slice(x, x[:1] * 5, (start, 0))

    start = jnp.int32(ROWS)
    with with_faults():
        ways = [
            jgt.verify_jit(put, X, start, in_shardings=(rows, None), out_shardings=rows),
            jgt.verify_jit(put, X, start, in_shardings=(P("data"), P()), out_shardings=P("data"), mesh=MESH),
            jgt.verify_jit(jax.jit(put, in_shardings=(rows, None), out_shardings=rows), X, start),
            jgt.verify_jit(put, jax.device_put(X, rows), start, out_shardings=rows),
            jgt.verify_jit(put, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows), START, out_shardings=rows),
        ]
        assert not any(way.is_right for way in ways)
        assert jgt.verify_jit(put, X, start, in_shardings=(whole, None), out_shardings=whole).is_right


def test_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)

    def loss(w, x):
        h = jax.sharding.reshard(jnp.tanh(x @ w), P("data", None))
        return lax.scan(lambda h, _: (jnp.tanh(h), None), h, None, length=2)[0].mean()

    given = [jax.device_put(x, NamedSharding(mesh, P(*spec))) for x, spec in ((W, (None, "tensor")), (X, ("data",)))]
    found = jgt.verify_jit(loss, *given, mesh=mesh)
    assert found.is_right
    assert found.num_compared == 3


def test_a_function_without_a_gradient_is_compared_without_it():
    def halve(x):
        return lax.while_loop(lambda x: jnp.max(x) > 0.1, lambda x: x / 2, split(x, "data"))

    found = jgt.verify_jit(halve, X)
    assert found.is_right
    assert found.num_compared == 1
    assert "Not compared: gradients" in str(found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jgt.verify_jit(put_behind_the_end, W, X, "first"), "argument 2 is of type str"),
        (lambda: jgt.verify_jit(jnp.sin, X), "nothing names a mesh"),
        (
            lambda: jgt.verify_jit(put_behind_the_end, W, X, 0, mesh=jgt.make_mesh({"data": 8})),
            "several meshes, data=4 x tensor=2 and data=8",
        ),
    ],
)
def test_wrong_input_is_one_line(call, message):
    with pytest.raises(jgt.InputError, match=message) as error:
        call()
    assert len(error.value.problems) == 1


def test_the_program_is_judged_operation_by_operation():
    """On one device, XLA computes this update in place and reads what it has overwritten (openxla/xla#49176)."""

    def shift(x):
        v = x.reshape(16, 2, 8)
        return v.at[2:].set(v[:-2])

    x = np.arange(256, dtype=np.float32).reshape(16, 16)
    right = x.reshape(16, 2, 8).copy()
    right[2:] = x.reshape(16, 2, 8)[:-2]
    program, _ = trace(jax.jit(shift), x)
    assert np.array_equal(Reference(program, [x], jax.devices()[0], ["y"]).results["y"], right)
    # A right layout raises no alarm, although the function compiled for one device is wrong.
    rules = {"inputs": [["data"], "..."], "default": "replicate"}
    assert jgt.verify(lambda p, x: jnp.sum(shift(x @ p) ** 3), rules, MESH, jnp.eye(16), x).is_right


def test_operations_one_by_one_are_the_function():
    """Branches, loops, scans in both directions, custom derivatives and recomputed regions, against the function itself."""

    @jax.custom_vjp
    def double(x):
        return x * 2

    double.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 2,))

    def run(x, keys):
        x = lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, double(x))
        x = lax.switch(jnp.int32(7), [jnp.sin, jnp.tanh], x)
        x, ys = lax.scan(jax.checkpoint(lambda h, k: (jnp.tanh(h) + jax.random.normal(k, h.shape), h[0])), x, keys, reverse=True)
        n, x = lax.while_loop(lambda nx: nx[0] < 3, lambda nx: (nx[0] + 1, jax.nn.relu(nx[1]) - 0.1), (0, x))
        return x, ys, n

    args = X, jax.random.split(jax.random.key(0), 3)
    program, _ = trace(run, *args)
    for a, b in zip(Reference(program, args, jax.devices()[0]).run()[0], run(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_integers_reach_the_ends_of_what_they_choose():
    def use(x, start, row, rows, ids, mask, flag):
        y = lax.dynamic_slice(x, (start, 0), (3, COLS))
        return y, x.at[row].set(0), x.at[rows].add(1.0), x[ids], x * mask, jnp.where(flag, x, 0)

    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    flags = jax.ShapeDtypeStruct((ROWS, 1), bool)
    program, _ = trace(use, X, i32(()), i32(()), i32((5,)), i32((9,)), i32((ROWS, 1)), flags)
    drawn = draws(program, [X, i32(()), i32(()), i32((5,)), i32((9,)), i32((ROWS, 1)), flags])
    start, row, rows, ids, mask, flag = ([np.asarray(each[n]) for each in drawn] for n in range(1, 7))
    # A slice of three rows begins at 13 at the latest.
    assert {14, 13, 0, -1} < {*map(int, start)} and min(start) < -ROWS
    assert {16, 15, 0, -1} < {*map(int, row)} and min(row) < -ROWS
    assert any((r < 0).any() and (r > 15).any() for r in rows)
    assert all(((i >= 0) & (i < ROWS)).all() and {0, ROWS - 1} <= {*i} for i in ids)
    assert all(((m >= 0) & (m < 4)).all() and 0 in m for m in mask)
    assert all(f.any() and not f.all() for f in flag)


# -- right programs ----------------------------------------------------------------------------------------------------

UNARY = {
    "tanh": jnp.tanh,
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "softmax of rows": lambda x: jax.nn.softmax(x, axis=0),
    "norm": lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
    "cumsum": lambda x: jnp.cumsum(x, axis=0) / 4,
    "sort": lambda x: jnp.sort(x, axis=0),
    "roll": lambda x: jnp.roll(x, 3, axis=0),
    "flip": lambda x: x[::-1],
    "take": lambda x: jnp.take(x, jnp.arange(ROWS) // 2, axis=0),
    "relu": jax.nn.relu,
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, axis=1, keepdims=True),
    "loop": lambda x: lax.scan(lambda h, w: (jnp.tanh(h * w), None), x, jnp.array([0.5, 1.5, 0.7], x.dtype))[0],
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * jnp.cos(x)),
    "reshape": lambda x: jnp.swapaxes(x.reshape(4, 4, COLS), 0, 1).reshape(ROWS, COLS),
    # The next ones lose digits.
    "a difference of large numbers": lambda x: (x + 100) - 100,
    "a variance by two sums": lambda x: jnp.mean((x + 30) ** 2, axis=0, keepdims=True) - jnp.mean(x + 30, axis=0, keepdims=True) ** 2 + x,
    "a residual": lambda x: x - x.sum(0, keepdims=True) / ROWS - (x - x.mean(0, keepdims=True)) + x.mean() * 1e-3,
    "a small denominator": lambda x: x / (x.mean(0, keepdims=True) ** 2 + 1e-3),
    "zero but for rounding": lambda x: (x.sum() - x[::-1].sum()) * 1e4 + x,
    "steps": lambda x: jnp.floor(x * 4) / 4 + x * 0.1,
    "the largest": lambda x: x * (x == x.max(0, keepdims=True)),
}
BINARY = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "gram": lambda x, y: x @ (x.T @ y) / ROWS,
    "gate": lambda x, y: jnp.where(x > y, x, y),
    "attend": lambda x, y: jax.nn.softmax(x @ y.T / 3, axis=-1) @ y,
    "join": lambda x, y: jnp.concatenate([x, y])[::2],
}
SPECS = [(), ("data",), (None, "tensor"), ("data", "tensor"), ("tensor", "data"), (("data", "tensor"),), (None, ("tensor", "data"))]


def right_program(seed):
    """A function of two matrices and a weight, with a constraint behind some operations; and its type."""
    choose = random.Random(seed)
    dtype = jnp.bfloat16 if seed % 3 == 0 else jnp.float32
    steps = [
        (choose.choice([*UNARY.values()]) if choose.random() < 0.6 else choose.choice([*BINARY.values()]), choose.choice(SPECS))
        for _ in range(choose.randint(2, 6))
    ]
    specs = [choose.choice(SPECS) for _ in range(3)]

    def run(w, x, y):
        x, y, w = (split(a, *spec) for a, spec in zip((x, y, w), specs, strict=True))
        for step, spec in steps:
            new = step(x) if step in UNARY.values() else step(x, y)
            x, y = split(new, *spec), x
        return x, jnp.mean(jnp.square(x @ w))

    return run, dtype


def check_right_program(seed):
    run, dtype = right_program(seed)
    args = [draw(shape, seed + n).astype(dtype) for n, shape in enumerate([(COLS, COLS), (ROWS, COLS), (ROWS, COLS)])]
    # Such layouts may meet faults of XLA. They are avoided in programs with a scope of jgt's.
    avoid_faults(scopes.OWN)
    found = jgt.verify_jit(scopes.rule()(run), *args)
    assert found.is_right, f"{seed}: {found}"


@pytest.mark.parametrize("seed", range(24))
def test_right_programs_raise_no_alarm(seed):
    """A third in bf16; many lose most of their digits."""
    check_right_program(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_a_thousand_right_programs_raise_no_alarm(first):
    for seed in range(first, first + 50):
        check_right_program(seed)
