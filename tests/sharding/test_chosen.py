"""Which dim of which parameter is split, and what a table of such specs matches."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgt
from jgt.replacements.replacement import ParameterPlace
from jgt.rules import Rules, SplitRule, match_param
from jgt.sharding.chosen import chosen_rules

LARGE = 1 << 17


def place_of(path, shape, sliced=()):
    dims = ((),) * len(shape)
    return ParameterPlace(path=path, shape=shape, dtype=np.float32, signals=(), dims=dims, optimizer_dims=dims, sliced=frozenset(sliced))


def chosen(places, sizes, axes=("fsdp",), pads=False, section="params"):
    # Only `tensor` asks about the program.
    return chosen_rules(Rules(), SplitRule(**{section: axes}), None, places, sizes, pads=pads)


@pytest.mark.parametrize(
    ("shape", "sliced", "pads", "spec"),
    [
        ((256, 1024), (), False, ((), ("fsdp",))),
        ((256, 256), (), False, ((), ("fsdp",))),
        ((1003, 256), (), False, ((), ("fsdp",))),
        # 1003 becomes 1008, which is half a percent more.
        ((1003, 255), (), True, (("fsdp",), ())),
        ((1003, 255), (), False, ((), ())),
        # 584 would be 1.2 percent more, but 384 divides.
        ((1, 577, 384), (), True, ((), (), ("fsdp",))),
        # 100,001 is nothing to pad beside 8, but 9 becomes 16.
        ((9, 9, 3333), (), True, ((), (), ("fsdp",))),
        ((17, 17, 17, 17), (), True, ((), (), (), ())),
        ((64, 32, 32), (0,), False, ((), ("fsdp",))),
        ((64, 1025), (0,), False, ((),)),
        ((255, 255), (), False, ((), ())),
        ((), (), False, ()),
    ],
)
def test_the_dim_that_is_split(shape, sliced, pads, spec):
    rules = chosen([place_of("a/w", shape, sliced)], {"fsdp": 8}, pads=pads)
    rule = match_param(rules, "a/w", [], len(shape) - len(sliced)).rule
    assert (rule.spec if rule else ((),) * (len(shape) - len(sliced))) == spec
    assert rules.reads == ("whole",) and rules.default == "replicate"


def test_two_axes_split_one_dim_or_two_or_what_they_can():
    sizes, axes = {"data": 4, "fsdp": 8, "tensor": 3}, ("fsdp", "tensor")
    found = chosen([place_of("a", (LARGE, 48)), place_of("b", (24, LARGE + 1)), place_of("c", (LARGE, 1))], sizes, axes)
    assert [rule.spec for rule in found.params] == [((), ("fsdp", "tensor")), (("fsdp", "tensor"), ()), (("fsdp",), ())]
    found = chosen([place_of("a", (8 * 1024, 33))], sizes, axes)
    assert [rule.spec for rule in found.params] == [(("fsdp",), ("tensor",))]


def test_each_parameter_gets_its_own_spec():
    """Patterns match ends of paths, and numbers of layers are folded where all of them agree."""
    shapes = {
        "w": (1024, 64),
        "a/w": (8, 8),
        "b/w": (64, 1024),
        "blocks/0/up": (256, 1024),
        "blocks/1/up": (256, 1024),
        "blocks/0/down": (256, 1024),
        "blocks/1/down": (1024, 256),
        "up": (2, 2),
        "x/blocks/0/up": (2, 2),
    }
    places = [place_of(path, shape) for path, shape in shapes.items()]
    rules = chosen(places, {"fsdp": 8})
    assert "blocks/*/up" in {rule.pattern for rule in rules.params} and "blocks/0/down" in {rule.pattern for rule in rules.params}
    for place in places:
        alone = chosen([place], {"fsdp": 8}).params
        found = match_param(rules, place.path, [], 2).rule
        assert not any(found.dims(2)) if not alone and found else (found and found.spec) == (alone[0].spec if alone else None), place.path


def test_an_array_by_itself():
    rules = chosen([place_of("", (512, 256))], {"fsdp": 8})
    assert match_param(rules, "", [], 2).rule.spec == (("fsdp",), ())


def test_the_state_alone():
    rules = chosen([place_of("w", (1024, 1024))], {"data": 8}, ("data",), section="optimizer")
    assert not rules.params and not rules.reads and [rule.spec for rule in rules.optimizer] == [((), ("data",))]


# -- which rules a program gets --------------------------------------------------------------------------------------


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"]) ** 2)


PARAMS = {"up": jnp.ones((64, 1024)), "down": jnp.ones((1024, 64))}
BATCH = {"x": jnp.ones((16, 64))}


@pytest.mark.parametrize(
    ("mesh", "rules", "dims"),
    [
        ({"fsdp": 8}, "jgt:fsdp", [(("fsdp",), ()), ((), ("fsdp",))]),
        ({"fsdp": 8}, "jgt:any", [(("fsdp",), ()), ((), ("fsdp",))]),
        ({"replica": 2, "fsdp": 4}, "jgt:hybrid", [(("fsdp",), ()), ((), ("fsdp",))]),
        ({"fsdp": 2, "tensor": 4}, "jgt:fsdp_tensor", [(("tensor",), ("fsdp",)), (("fsdp",), ("tensor",))]),
        ({"data": 2, "tensor": 4}, "jgt:tensor", [(("tensor",), ()), ((), ("tensor",))]),
        ({"data": 8}, "jgt:zero1", [((), ()), ((), ())]),
    ],
)
def test_shipped_rules_on_a_program_without_names(mesh, rules, dims):
    sharded = jgt.shard(loss, rules, jgt.make_mesh(mesh))
    placement = sharded.placement(PARAMS, BATCH)
    assert [p.dims for p in placement.parameters] == dims and placement.rules.is_chosen
    assert any(any(p.optimizer_dims) for p in placement.parameters)
    assert placement.inputs(BATCH)["x"].spec[0] == (("replica", "fsdp") if "replica" in mesh else next(iter(mesh)))
    value, gradients = jax.jit(jax.value_and_grad(sharded))(PARAMS, BATCH)
    expected = jax.value_and_grad(loss)(PARAMS, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (value, gradients), expected)


def test_rules_that_fit_stay_as_they_are():
    tree = {"params": {"up": [None, "fsdp"]}, "default": "replicate", "otherwise": {"params": ["fsdp"]}}
    mesh = jgt.make_mesh({"fsdp": 8})
    found = jgt.shard(loss, tree, mesh).placement(PARAMS, BATCH)
    assert [p.dims for p in found.parameters] == [((), ()), ((), ("fsdp",))] and not found.rules.is_chosen
    found = jgt.shard(loss, {**tree, "params": {}}, mesh).placement(PARAMS, BATCH)
    assert [p.dims for p in found.parameters] == [(("fsdp",), ()), ((), ("fsdp",))] and found.rules.is_chosen
    # A slip in rules of one's own is not taken for another program.
    for wrong in ({"upp": [None, "fsdp"]}, {"up": [None, None, "fsdp"]}):
        with pytest.raises(jgt.InputError, match=r"no parameter matches|Shorten the spec"):
            jgt.shard(loss, {**tree, "params": wrong}, mesh).placement(PARAMS, BATCH)
    # Of a part of a program, some rules may match nothing.
    part = {**tree, "params": {"up": [None, "fsdp"], "other": [None, "fsdp"]}}
    assert not jgt.shard(loss, part, mesh, partial=True).placement(PARAMS, BATCH).rules.is_chosen


# -- parameters that are read whole ----------------------------------------------------------------------------------


def stacked(params, batch):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    return jnp.mean(jax.lax.scan(layer, batch["x"], params["w"])[0] ** 2)


def gathers(program, inside=0):
    """Each value that a constraint makes whole, and the number of loops around it."""
    for equation in program.eqns:
        if equation.primitive.name == "sharding_constraint" and not any(equation.params["sharding"].spec) and equation.invars[0].aval.ndim:
            yield equation.invars[0].aval, inside
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if inner := getattr(value, "jaxpr", value if hasattr(value, "eqns") else None):
                yield from gathers(inner, inside + (equation.primitive.name == "scan"))


def test_a_stack_is_gathered_layer_by_layer_and_again_in_the_backward_pass():
    params, batch = {"w": jax.random.normal(jax.random.key(0), (16, 256, 256)) / 64}, {"x": jax.random.normal(jax.random.key(1), (64, 256))}
    sharded = jgt.shard(stacked, "jgt:fsdp", jgt.make_mesh({"fsdp": 8}))
    assert {loops for _, loops in gathers(jax.make_jaxpr(jax.grad(sharded))(params, batch).jaxpr)} == {1}
    placement = sharded.placement(params, batch)
    shardings = {"in_shardings": (placement.params, placement.inputs(batch)), "out_shardings": placement.gradients}
    step = jax.jit(jax.grad(sharded), **shardings)
    whole = params["w"].nbytes
    # Gathered whole, the stack alone would need more.
    assert step.lower(params, batch).compile().memory_analysis().temp_size_in_bytes < Fraction(3, 4) * whole
    np.testing.assert_allclose(step(params, batch)["w"], jax.grad(stacked)(params, batch)["w"], rtol=1e-4, atol=1e-6)


def test_what_a_loop_reads_in_every_step_is_gathered_before_it():
    def recurrent(params, batch):
        return jnp.mean(jax.lax.scan(lambda x, _: (jnp.tanh(x @ params["w"]), None), batch["x"], None, length=4)[0])

    params, batch = {"w": jnp.ones((256, 256))}, {"x": jnp.ones((64, 256))}
    sharded = jgt.shard(recurrent, "jgt:fsdp", jgt.make_mesh({"fsdp": 8}))
    assert [loops for _, loops in gathers(jax.make_jaxpr(sharded)(params, batch).jaxpr)] == [0]


def test_a_cast_comes_before_the_gather():
    def cast(params, batch):
        return jnp.mean(batch["x"] @ params["w"].astype(jnp.bfloat16).T)

    params, batch = {"w": jnp.ones((256, 256))}, {"x": jnp.ones((64, 256), jnp.bfloat16)}
    sharded = jgt.shard(cast, "jgt:fsdp", jgt.make_mesh({"fsdp": 8}))
    assert [value.dtype for value, _ in gathers(jax.make_jaxpr(sharded)(params, batch).jaxpr)] == [jnp.bfloat16]


def test_the_axes_over_which_parameters_are_read_whole():
    """`reads` may name some of the axes; the others stay, and one that the mesh lacks is an error."""
    mesh = jgt.make_mesh({"fsdp": 2, "tensor": 4})
    rules = {"params": {"up": ["fsdp", "tensor"], "down": ["tensor", None]}, "reads": ["fsdp"], "default": "replicate"}
    sharded = jgt.shard(loss, rules, mesh)
    read = [(one.spec, one.backward) for one in sharded.inserted(PARAMS, BATCH) if one.value == "parameter, read whole"]
    assert read == [("[null, tensor]", "[fsdp, tensor]")]
    assert sharded.placement(PARAMS, BATCH).rules.tree()["reads"] == ["fsdp"]
    with pytest.raises(jgt.InputError, match=r"reads: the mesh has no axis 'fsdq'. Did you mean 'fsdp'\?"):
        jgt.shard(loss, {**rules, "reads": "fsdq"}, mesh).placement(PARAMS, BATCH)
