"""The JAX internals that jgt relies on, one test for each fact. If a new JAX changes one of them, it fails here first."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from next_checkpoint import ASKS_POLICIES, Base, asks_policies, next_checkpoint

import jgt
from jgt.program import jaxpr as jx
from jgt.program.constraints import constraint_equations, ignores_policy, wrap_in_checkpoint
from jgt.program.dataflow import unchanged_arguments
from jgt.program.places import Place, manual_mesh, mesh_around, place_of, vmapped_axes
from jgt.signal import context, tensor

X = jnp.float32(0.5)


def only(program, *, having):
    """The only equation with this primitive, or with this key in its params."""
    found = [e for e in jx.body(program).eqns if (e.primitive.name == having or having in e.params)]
    assert len(found) == 1
    return found[0]


def scanned(x):
    return jax.lax.scan(lambda h, w: (jnp.sin(h) * w, h), x, jnp.ones((3,), x.dtype))


def with_jvp():
    fn = jax.custom_jvp(lambda x: jnp.sin(x))
    fn.defjvp(lambda primals, tangents: (fn(*primals), jnp.cos(primals[0]) * tangents[0]))
    return fn


def with_vjp():
    fn = jax.custom_vjp(lambda x: jnp.sin(x))
    fn.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * g,))
    return fn


def next_remat(x):
    with next_checkpoint():
        return jax.checkpoint(jnp.sin)(x)


class Doubled(Base):
    """A primitive that is an object with a program in it, and twice the derivative of that program."""

    def __init__(self, jaxpr):
        self.in_avals, self.out_aval = tuple(v.aval for v in jx.body(jaxpr).invars), jx.body(jaxpr).outvars[0].aval
        self.params = {"jaxpr": jaxpr}
        super().__init__()

    def expand(self, x):
        return jx.evaluate(self.jaxpr, [x])[0]

    def vjp_fwd(self, is_real, x):
        return self(x), x

    def vjp_bwd_retval(self, x, g):
        return (2 * jax.vjp(self.expand, x)[1](g)[0],)


def hijax(x):
    return Doubled(jax.make_jaxpr(jnp.sin)(x))(x)


def sharded_map(x):
    return jax.shard_map(jnp.sin, mesh=jgt.make_mesh({"data": 8}), in_specs=P(), out_specs=P())(x)


# Each: a function whose program holds one equation with programs inside, and how many of them.
NESTING = {
    "jit": (jax.jit(jnp.sin), 1),
    "scan": (scanned, 1),
    "while": (lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x)), 2),
    "cond": (lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), 2),
    "remat": (jax.checkpoint(jnp.sin), 1),
    "next remat": (next_remat, 1),
    "hijax": (hijax, 1),
    "custom_jvp": (with_jvp(), 1),
    "custom_vjp": (with_vjp(), 1),
    "shard_map": (sharded_map, 1),
}


def nesting_equation(fn):
    program, _ = jx.trace(fn, X)
    (equation,) = [e for e in jx.body(program).eqns if list(jx.subprograms(e))]
    return program, equation


@pytest.mark.parametrize("kind", NESTING)
def test_every_program_inside_an_equation_is_found(kind):
    fn, count = NESTING[kind]
    _, equation = nesting_equation(fn)
    programs = list(jx.subprograms(equation))
    assert len(programs) == count
    assert all(jx.body(p).eqns for p in programs)


@pytest.mark.parametrize("kind", NESTING)
def test_programs_inside_an_equation_can_be_replaced(kind):
    fn, _ = NESTING[kind]
    program, equation = nesting_equation(fn)

    def negate(inner):
        # sin becomes cos.
        cos = only(jax.make_jaxpr(jnp.cos)(X), having="cos").primitive
        eqns = [e.replace(primitive=cos) if e.primitive.name == "sin" else e for e in jx.body(inner).eqns]
        return jx.with_body(inner, eqns=eqns, outvars=jx.body(inner).outvars)

    new = jx.map_subprograms(equation, negate)
    eqns = [new if e is equation else e for e in jx.body(program).eqns]
    changed = jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)
    cosine = {
        "scan": lambda x: jax.lax.scan(lambda h, w: (jnp.cos(h) * w, h), x, jnp.ones((3,))),
        "while": lambda x: (3, _thrice(jnp.cos, x)),
    }
    expected = cosine.get(kind, jnp.cos)(X)
    for got, want in zip(jx.evaluate(changed, [X]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def _thrice(fn, x):
    return fn(fn(fn(x)))


@pytest.mark.parametrize("kind", NESTING)
def test_an_equation_whose_programs_stay_is_left_alone(kind):
    _, equation = nesting_equation(NESTING[kind][0])
    assert jx.map_subprograms(equation, lambda inner: inner) is equation


@pytest.mark.parametrize("kind", NESTING)
def test_a_program_can_be_evaluated_and_differentiated(kind):
    if kind == "while":
        pytest.skip("a loop of unknown length has no gradient")
    fn = NESTING[kind][0]
    first = lambda x: jax.tree.leaves(fn(x))[0]  # noqa: E731
    program, _ = jx.trace(first, X)
    value, gradient = jax.value_and_grad(lambda x: jx.evaluate(program, [x])[0])(X)
    expected, expected_gradient = jax.value_and_grad(first)(X)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)


@pytest.mark.parametrize("kind", NESTING)
def test_the_operands_and_results_of_an_inner_program_line_up(kind):
    fn, _ = NESTING[kind]
    _, equation = nesting_equation(fn)
    for inner in jx.subprograms(equation):
        behind = jx.outer_operands(equation, inner)
        assert len(behind) == len(jx.body(inner).invars)
        assert all(o in equation.invars for o in behind)
        assert len(jx.outer_results(equation, inner)) == len(jx.body(inner).outvars)


def test_the_constants_of_a_loops_condition_and_of_its_body_are_told_apart():
    def fn(limit, step, x):
        return jax.lax.while_loop(lambda c: c[1] < limit, lambda c: (c[0] * 2, c[1] + step), (x, x))

    (equation,) = jx.body(jax.make_jaxpr(fn)(X, X, X)).eqns
    limit, step, x = equation.invars[:3]
    assert jx.outer_operands(equation, equation.params["cond_jaxpr"]) == [limit, x, x]
    assert jx.outer_operands(equation, equation.params["body_jaxpr"]) == [step, x, x]


def test_the_constants_of_a_linear_solves_programs_are_told_apart():
    def fn(a, b, c, x):
        return jax.lax.custom_linear_solve(lambda y: a * y, x, lambda _, y: y / b, lambda _, y: y / c)

    (equation,) = jx.body(jax.make_jaxpr(fn)(X, X, X, X)).eqns
    a, b, c, x = dict.fromkeys(equation.invars)
    found = [jx.outer_operands(equation, program) for program in jx.subprograms(equation)]
    assert found == [[a, x], [a, x], [b, x], [c, x]]


def test_a_loops_condition_makes_none_of_its_results():
    """The loop carries one value, and so has one result, like its condition."""
    program, _ = jx.trace(lambda x: jax.lax.while_loop(lambda c: c < 3, lambda c: c, x), X)
    (equation,) = jx.body(program).eqns
    assert jx.outer_results(equation, equation.params["cond_jaxpr"]) == [None]
    assert jx.outer_results(equation, equation.params["body_jaxpr"]) == equation.outvars
    assert unchanged_arguments(program) == [0]


# Each: a function that returns its argument, and something else.
KEEPING = {
    "at once": lambda x: (x, x * 2),
    "jit": jax.jit(lambda x: (x, x * 2)),
    "remat": jax.checkpoint(lambda x: (x, jnp.sin(x))),
    "jit in remat": jax.checkpoint(jax.jit(lambda x: (x, jnp.sin(x)))),
    "scan": lambda x: jax.lax.scan(lambda c, _: ((c[0], jnp.sin(c[1])), None), (x, x), None, length=2)[0],
    "cond": lambda x: jax.lax.cond(x > 0, lambda x: (x, x * 2), lambda x: (x, x), x),
    "while": lambda x: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1), (x, x)),
}


@pytest.mark.parametrize("kind", KEEPING)
def test_an_argument_that_comes_out_unchanged_is_known(kind):
    program, _ = jx.trace(lambda a, b: (b, *KEEPING[kind](a), 1.0), X, X)
    assert unchanged_arguments(program) == [1, 0, None, None]


def test_only_a_jvp_or_vjp_rule_hides_in_a_function():
    _, jvp = nesting_equation(with_jvp())
    _, vjp = nesting_equation(with_vjp())
    assert "jvp_jaxpr_fun" in jvp.params
    assert "fwd_jaxpr_thunk" in vjp.params


@pytest.mark.parametrize(("make", "key"), [(with_jvp, "jvp_jaxpr_fun"), (with_vjp, "fwd_jaxpr_thunk")])
def test_the_rule_of_a_derivative_is_changed_when_it_is_asked_for(make, key):
    program, equation = nesting_equation(make())
    seen = []

    def change(inner):
        seen.append([e.primitive.name for e in jx.body(inner).eqns])
        return jx.with_body(inner, eqns=list(jx.body(inner).eqns), outvars=jx.body(inner).outvars)

    new = jx.map_subprograms(equation, change)
    assert len(seen) == 1
    eqns = [new if e is equation else e for e in jx.body(program).eqns]
    changed = jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)
    gradient = jax.grad(lambda x: jx.evaluate(changed, [x])[0])(X)
    np.testing.assert_allclose(gradient, jnp.cos(X), rtol=1e-6)
    assert len(seen) == 2, key


def test_a_scan_is_recognised_and_nothing_else_is():
    assert {kind for kind, (fn, _) in NESTING.items() if jx.is_scan(nesting_equation(fn)[1])} == {"scan"}


def test_a_remat_region_is_recognised_and_nothing_else_is():
    assert {kind for kind, (fn, _) in NESTING.items() if jx.is_remat(nesting_equation(fn)[1])} == {"remat", "next remat"}


def test_the_derivative_of_a_primitive_that_is_an_object_is_of_its_new_program():
    program, equation = nesting_equation(hijax)
    new = jx.map_subprograms(equation, lambda _: jax.make_jaxpr(jnp.tanh)(X))
    changed = jx.with_body(program, eqns=[new], outvars=jx.body(program).outvars)
    gradient = jax.jit(jax.grad(lambda x: jx.evaluate(changed, [x])[0]))(X)
    np.testing.assert_allclose(gradient, 2 * jax.grad(jnp.tanh)(X), rtol=1e-6)


def test_a_primitive_that_is_an_object_may_get_arrays_of_another_shape():
    _, equation = nesting_equation(next_remat)
    (old,), (out,) = equation.invars, equation.outvars
    var, new_out = (jx.new_var_of(v, (3,)) for v in (old, out))
    new = jx.map_subprograms(equation.replace(invars=[var], outvars=[new_out]), lambda _: jax.make_jaxpr(jnp.sin)(jnp.ones(3)))
    program = jx.program_of(next(jx.subprograms(equation)), [var], [new], [new_out])
    gradient = jax.grad(lambda x: jx.evaluate(program, [x])[0].sum())(jnp.ones(3))
    np.testing.assert_allclose(gradient, jnp.cos(jnp.ones(3)), rtol=1e-6)


def test_a_named_value_is_recognised():
    program, _ = jx.trace(lambda x: jnp.sin(tensor(x, "heads")), X)
    assert [jx.tensor_name(e) for e in jx.body(program).eqns] == ["heads", None]
    with next_checkpoint():
        program, _ = jx.trace(jax.checkpoint(lambda x: jnp.sin(tensor(x, "heads"))), X)
    assert [jx.tensor_name(e) for e in jx.body(next(jx.subprograms(jx.body(program).eqns[0]))).eqns] == ["heads", None]


@pytest.mark.parametrize("is_next", [False, pytest.param(True, marks=asks_policies)])
def test_a_remat_policy_is_asked_about_names(is_next):
    asked = []

    def policy(primitive, *_, **params):
        asked.append(primitive.name == "name" and params["name"])
        return False

    with next_checkpoint(is_next):
        program, _ = jx.trace(jax.checkpoint(lambda x: jnp.sin(tensor(jnp.sin(x), "h")), policy=policy), X)
        jax.make_jaxpr(jax.grad(lambda x: jx.evaluate(program, [x])[0]))(X)
    assert "h" in asked
    # The next implementation asks about names, matmuls and convolutions alone.
    assert (False in asked) is not is_next


def test_a_policy_that_jax_does_not_ask_is_known():
    with next_checkpoint():
        program, _ = jx.trace(jax.checkpoint(lambda x: jnp.sin(tensor(jnp.sin(x), "h"))), X)
    (equation,) = jx.body(program).eqns
    keeps = [ignores_policy(jx.with_params(equation, policy=lambda *_, **__: answer)) for answer in (True, False)]
    assert keeps == [not ASKS_POLICIES, False]


def test_a_place_counts_vmaps_and_signals():
    def fn(x):
        with context("a"):
            return jax.vmap(jax.vmap(lambda y: context("b")(jnp.sin)(y)))(x)

    equation = only(jax.make_jaxpr(fn)(jnp.ones((2, 2))), having="sin")
    place = place_of(equation, Place(("top",), 1))
    assert place == Place(("top", "a", "b"), 3)
    assert place.path == "top/a/b"
    assert place.inside(("top", "a"))
    assert not place.inside(("a",))


def test_derivatives_are_no_vmaps():
    program = jax.make_jaxpr(jax.jvp, static_argnums=0)(context("a")(jnp.sin), (X,), (X,))
    assert place_of(only(program, having="cos"), Place()) == Place(("a",), 0)


def test_the_backward_pass_of_a_recomputed_part_of_a_loop_is_in_its_signal_once():
    def loss(x):
        with context("layers"):
            return jnp.sum(jax.lax.scan(lambda x, w: (context("mlp")(jax.checkpoint(jnp.sin))(x) * w, None), x, jnp.ones(3))[0])

    def paths(program, around):
        for equation in jx.body(program).eqns:
            place = place_of(equation, around)
            yield place.path
            for inner in jx.subprograms(equation):
                yield from paths(inner, place)

    # Some versions of JAX have equations outside of the signal, too.
    for is_next in (False, True):
        with next_checkpoint(is_next):
            assert set(paths(jax.make_jaxpr(jax.grad(loss))(X), Place())) - {""} == {"layers", "layers/mlp"}


def test_a_dropped_result_and_a_literal_are_recognised():
    equation = only(jax.make_jaxpr(lambda x: x * 2.0)(X), having="mul")
    assert [jx.is_var(a) for a in equation.invars] == [True, False]
    assert not jx.is_dropped(equation.outvars[0])
    assert jx.is_dropped(jex.DropVar(equation.outvars[0].aval))


def test_a_program_with_constants_keeps_them():
    constant = np.arange(3.0, dtype=np.float32)
    program, _ = jx.trace(lambda x: x + constant, jnp.zeros(3))
    same = jx.with_body(program, eqns=jx.body(program).eqns, outvars=jx.body(program).outvars)
    np.testing.assert_array_equal(jx.evaluate(same, [jnp.zeros(3)])[0], constant)


def test_trace_takes_shapes_and_returns_the_tree():
    program, tree = jx.trace(lambda x: {"a": x, "b": (x, x)}, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert jax.tree.unflatten(tree, [1, 2, 3]) == {"a": 1, "b": (2, 3)}
    assert isinstance(program, jex.Jaxpr | jex.ClosedJaxpr)


def test_the_mesh_of_a_shard_map_is_known_inside_of_it():
    mesh = jgt.make_mesh({"data": 4, "tensor": 2})
    program, _ = jx.trace(jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}), jnp.ones(8))
    outer = only(program, having="jaxpr")
    inner = only(next(jx.subprograms(outer)), having="sin")
    assert manual_mesh(outer) is None
    assert set(manual_mesh(inner).manual_axes) == {"data"}


def test_the_mesh_of_a_shard_map_is_known_while_it_is_traced():
    seen = []

    def look(x):
        seen.append(mesh_around())
        return x

    jax.make_jaxpr(
        jax.shard_map(look, mesh=jgt.make_mesh({"data": 4, "tensor": 2}), in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    )(jnp.ones(8))
    look(0)
    assert set(seen[0].manual_axes) == {"data"}
    assert seen[1] is None


def pinned(forward, backward):
    program, _ = jx.trace(context("s")(jnp.sin), jnp.ones(8))
    equation = only(program, having="sin")
    new, var = constraint_equations(equation.outvars[0], forward, backward, equation)
    return jx.with_body(program, eqns=[*jx.body(program).eqns, *new], outvars=[var]), new


def test_the_axes_that_a_vmap_claims_are_known_inside_of_it():
    seen = []

    def look(x):
        seen.append(vmapped_axes())
        return x

    jax.vmap(look, spmd_axis_name="data")(np.zeros(4, np.float32))
    look(0)
    assert seen == [{"data"}, frozenset()]


def test_a_constraint_takes_the_place_of_its_equation():
    sharding = NamedSharding(jgt.make_mesh({"data": 8}), P("data"))
    program, new = pinned(sharding, sharding)
    assert [place_of(e, Place()).path for e in new] == ["s"]
    np.testing.assert_allclose(jx.evaluate(program, [jnp.ones(8)])[0], jnp.sin(jnp.ones(8)))
    assert jax.jit(lambda x: jx.evaluate(program, [x])[0])(jnp.ones(8)).sharding.is_equivalent_to(sharding, 1)


def test_a_constraint_with_another_backward_pins_the_cotangent_at_its_signal():
    mesh = jgt.make_mesh({"data": 8})
    program, new = pinned(NamedSharding(mesh, P()), NamedSharding(mesh, P("data")))
    assert {place_of(e, Place()).path for e in new} == {"s"}
    gradient = jax.grad(lambda x: jx.evaluate(program, [x])[0].sum())
    np.testing.assert_allclose(gradient(jnp.ones(8)), jnp.cos(jnp.ones(8)), rtol=1e-6)
    pins = [e for e in jx.body(jax.make_jaxpr(gradient)(jnp.ones(8))).eqns if e.primitive.name == "sharding_constraint"]
    assert [str(e.params["sharding"].spec) for e in pins][-1] == str(P("data"))
    assert place_of(pins[-1], Place()).path == "s"


@pytest.mark.parametrize("in_scan", [False, True])
def test_a_program_can_be_put_into_a_checkpoint(in_scan):
    program, _ = jx.trace(lambda x: jnp.sin(tensor(jnp.sin(x), "h")), X)
    inside = wrap_in_checkpoint(program, jax.checkpoint_policies.save_only_these_names("h"), in_scan=in_scan)
    (equation,) = jx.body(inside).eqns
    assert jx.is_remat(equation)
    assert equation.params["prevent_cse"] is not in_scan
    np.testing.assert_allclose(jx.evaluate(inside, [X])[0], jnp.sin(jnp.sin(X)), rtol=1e-6)


def test_a_checkpoint_keeps_the_signature_weak_types_included():
    program = jax.make_jaxpr(lambda x: x * 2)(1.0)
    inside = wrap_in_checkpoint(program, jax.checkpoint_policies.nothing_saveable, in_scan=True)
    assert [v.aval for v in jx.body(inside).invars] == [v.aval for v in jx.body(program).invars]
    assert [v.aval for v in jx.body(inside).outvars] == [v.aval for v in jx.body(program).outvars]
    assert jx.body(inside).invars[0].aval.weak_type


def test_a_checkpoint_keeps_the_signals():
    program, _ = jx.trace(context("s")(jnp.sin), X)
    (equation,) = jx.body(wrap_in_checkpoint(program, jax.checkpoint_policies.nothing_saveable, in_scan=False)).eqns
    inner = next(jx.subprograms(equation))
    assert place_of(only(inner, having="sin"), Place()).path == "s"
