"""The layout of parameters, gradients, optimizer state and inputs; none of them is ever created whole on one device."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from placements import ABSTRACT, BLOCK_RULES, MLP, MLP_RULES, MLP_X, SIZES, mlp, multiply, places, problems_of, shapes

import jgt
from jgt.signal import context, tensor

# -- parameters → signals


def test_parameters_of_a_plain_tree_are_placed_by_their_use():
    assert places(mlp, MLP_RULES, MLP, MLP_X) == {
        "head": (("head",), "[fsdp, null]"),
        "layers/bias": (("layers/mlp",), "[null, null]"),
        "layers/down": (("layers/mlp",), "[null, tensor, fsdp]"),
        "layers/up": (("layers/mlp",), "[null, fsdp, tensor]"),
    }


def test_a_cast_of_the_whole_tree_is_followed():
    cast = lambda params, x: mlp(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), x.astype(jnp.bfloat16))  # noqa: E731
    assert places(cast, MLP_RULES, MLP, MLP_X) == places(mlp, MLP_RULES, MLP, MLP_X)


@pytest.mark.parametrize(
    "change",
    [
        lambda params: jax.tree.map(lambda w: w * 2.0, params),
        lambda params: jax.tree.map(lambda w: jnp.swapaxes(jnp.swapaxes(w, 0, 1), 0, 1), params),
        lambda params: jax.jit(lambda p: jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), p))(params),
        jax.lax.stop_gradient,
    ],
    ids=["scale", "transpose", "cast in jit", "stop_gradient"],
)
def test_changes_of_a_single_parameter_are_followed(change):
    assert places(lambda params, x: mlp(change(params), x), MLP_RULES, MLP, MLP_X) == places(mlp, MLP_RULES, MLP, MLP_X)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fn: lambda p, x: jax.vmap(fn, (None, 0))(p, x[None])])
def test_uses_are_found_inside(wrap):
    assert places(wrap(mlp), MLP_RULES, MLP, MLP_X) == places(mlp, MLP_RULES, MLP, MLP_X)


def test_nested_scans_slice_two_dims():
    def fn(params, x):
        inner = lambda h, w: (context("block")(jnp.matmul)(h, w), None)  # noqa: E731
        return jax.lax.scan(lambda h, ws: jax.lax.scan(inner, h, ws), x, params["w"])[0]

    rules = {"signals": {"block": {"params": {"w": ["fsdp", "tensor"]}}}}
    assert places(fn, rules, shapes(w=(2, 3, 8, 8)), MLP_X) == {"w": (("block",), "[null, null, fsdp, tensor]")}


def two_at_a_time(h, ws):
    return multiply(multiply(h, ws[0]), ws[1]), None


def nested(h, ws):
    return jax.lax.scan(lambda h, w: (multiply(h, w), None), h, ws)


@pytest.mark.parametrize("body", [two_at_a_time, nested])
def test_layers_taken_several_at_a_time(body):
    fn = lambda params, x: jax.lax.scan(body, x, params["w"].reshape(3, 2, 8, 8))[0]  # noqa: E731
    assert places(fn, BLOCK_RULES, shapes(w=(6, 8, 8)), MLP_X) == {"w": (("block",), "[null, fsdp, tensor]")}


def test_layers_that_a_batched_matmul_takes_together_keep_their_dim():
    fn = lambda params, x: jax.lax.scan(  # noqa: E731
        lambda h, ws: (jnp.sum(multiply(h[None], ws), 0), None), x, params["w"].reshape(3, 2, 8, 8)
    )[0]
    assert places(fn, {"signals": {"block": {"params": {"w": [None, "fsdp", "tensor"]}}}}, shapes(w=(6, 8, 8)), MLP_X)


@pytest.mark.parametrize("shape", [(1, 8, 8, 1), (8, 8), (2, 4, 4, 2), (64,), (4, 16)])
def test_a_reshape_of_a_single_layer_slices_nothing(shape):
    fn = lambda params, x: multiply(x, params["w"].reshape(shape).reshape(8, 8))  # noqa: E731
    assert places(fn, BLOCK_RULES, shapes(w=(8, 8)), MLP_X) == {"w": (("block",), "[fsdp, tensor]")}


def python_loop(params, x):
    for n in range(3):
        x = multiply(x, params["w"][n])
    return x


def unstacked(params, x):
    for w in jnp.unstack(params["w"]):
        x = multiply(x, w)
    return x


def fori(params, x):
    return jax.lax.fori_loop(0, 3, lambda n, h: multiply(h, params["w"][n]), x)


def scan_of_indices(params, x):
    return jax.lax.scan(lambda h, n: (multiply(h, params["w"][n]), None), x, jnp.arange(3))[0]


@pytest.mark.parametrize(
    ("fn", "shape", "spec"),
    [
        (python_loop, (3, 8, 8), "[null, fsdp, tensor]"),
        (lambda params, x: [multiply(x, w) for w in params["w"]], (3, 8, 16), "[null, fsdp, tensor]"),
        (unstacked, (3, 8, 8), "[null, fsdp, tensor]"),
        (fori, (3, 8, 8), "[null, fsdp, tensor]"),
        (scan_of_indices, (3, 8, 8), "[null, fsdp, tensor]"),
        (lambda params, x: multiply(x, params["w"][:, 1]), (8, 3, 16), "[fsdp, null, tensor]"),
        (lambda params, x: multiply(x, params["w"][..., 1]), (8, 16, 3), "[fsdp, tensor, null]"),
        (lambda params, x: multiply(x, params["w"][1, :, 2]), (3, 8, 4, 16), "[null, fsdp, null, tensor]"),
        (lambda params, x: multiply(x, params["w"].T[1].T), (8, 16, 3), "[fsdp, tensor, null]"),
    ],
    ids=["loop", "iteration", "unstack", "fori_loop", "scan", "middle", "last", "two", "transposed"],
)
def test_a_dim_that_is_indexed_is_not_the_specs(fn, shape, spec):
    assert places(fn, BLOCK_RULES, shapes(w=shape), MLP_X) == {"w": (("block",), spec)}


def test_a_dim_of_its_own_that_is_squeezed_is_the_specs():
    rules = {"signals": {"block": {"params": {"w": ["fsdp", None, "tensor"]}}}}
    fn = lambda params, x: multiply(x, params["w"].squeeze(1))  # noqa: E731
    assert places(fn, rules, shapes(w=(8, 1, 8)), MLP_X) == {"w": (("block",), "[fsdp, null, tensor]")}


def test_a_scan_of_length_one_slices_too():
    fn = lambda params, x: jax.lax.scan(lambda h, w: (multiply(h, w), None), x, params["w"])[0]  # noqa: E731
    assert places(fn, BLOCK_RULES, shapes(w=(1, 8, 8)), MLP_X) == {"w": (("block",), "[null, fsdp, tensor]")}


@pytest.mark.parametrize(("shape", "problem"), [((8,), "Shorten the spec"), ((8, 2, 4), "Write null for a dim that is not sharded")])
def test_a_spec_has_exactly_the_dims_of_the_parameter(shape, problem):
    fn = lambda params, x: context("block")(jnp.matmul)(x, params["w"].reshape(8, -1))  # noqa: E731
    (found,) = problems_of(fn, jgt.make_rules(BLOCK_RULES), ABSTRACT, shapes(w=shape), MLP_X)
    assert f"rules: w: the spec has 2 dims, but the parameter w has {len(shape)}" in found
    assert problem in found


@pytest.mark.parametrize(
    "penalty",
    [
        lambda w: (w**2).sum(),
        lambda w: (w * w).sum(),
        lambda w: jnp.vdot(w, w),
        jnp.linalg.norm,
        lambda w: context("penalty")(lambda v: (v**2).sum())(w),
        lambda w: context("penalty")(jnp.vdot)(w, w),
    ],
    ids=["square", "product", "vdot", "norm", "context", "vdot in context"],
)
def test_a_penalty_on_a_parameter_does_not_count_beside_another_use(penalty):
    fn = lambda params, x: multiply(x, params["w"]).sum() + penalty(params["w"])  # noqa: E731
    assert places(fn, BLOCK_RULES, shapes(w=(8, 8)), MLP_X) == {"w": (("block",), "[fsdp, tensor]")}


def test_a_penalty_that_is_the_only_use_counts():
    fn = lambda params, x: context("block")(lambda v: (v**2).sum())(params["w"]) + x.sum()  # noqa: E731
    assert places(fn, BLOCK_RULES, shapes(w=(8, 8)), MLP_X) == {"w": (("block",), "[fsdp, tensor]")}


def test_a_parameter_normed_by_itself_is_followed():
    fn = lambda params, x: multiply(x, params["w"] / jnp.linalg.norm(params["w"]))  # noqa: E731
    assert places(fn, BLOCK_RULES, shapes(w=(8, 8)), MLP_X) == {"w": (("block",), "[fsdp, tensor]")}
    by_rows = lambda params, x: multiply(x, params["w"] - params["w"].mean(0, keepdims=True))  # noqa: E731
    assert places(by_rows, BLOCK_RULES, shapes(w=(8, 8)), MLP_X) == {"w": (("block",), "[fsdp, tensor]")}


def test_a_scalar_is_used_where_it_meets_an_array():
    def fn(params, x):
        with context("gate"):
            x = x * jnp.exp(params["gate"])
        return multiply(jnp.tanh(x) / jnp.linalg.norm(params["w"]), params["w"])

    rules = {"signals": {**BLOCK_RULES["signals"], "gate": {"params": {"gate": []}}}}
    assert places(fn, rules, shapes(w=(8, 8), gate=()), MLP_X) == {"gate": (("gate",), "[]"), "w": (("block",), "[fsdp, tensor]")}


def test_the_condition_of_a_loop_and_its_body_use_their_own_parameters():
    def fn(params, x):
        stop = lambda c: context("stop")(jnp.dot)(c[1][0], params["s"]) < 3  # noqa: E731
        return jax.lax.while_loop(stop, lambda c: (c[0] + 1, multiply(c[1], params["w"])), (0, x))[1]

    rules = {"signals": {**BLOCK_RULES["signals"], "stop": {"params": {"s": ["tensor"]}}}}
    assert places(fn, rules, shapes(w=(8, 8), s=(8,)), MLP_X) == {"s": (("stop",), "[tensor]"), "w": (("block",), "[fsdp, tensor]")}


def test_a_parameter_under_no_signal_takes_the_default():
    fn = lambda params, x: x @ params["w"]  # noqa: E731
    assert places(fn, {"default": "replicate"}, shapes(w=(8, 8)), MLP_X) == {"w": ((), "[null, null]")}


def test_an_unused_parameter_takes_the_default():
    fn = lambda params, x: x  # noqa: E731
    assert places(fn, {"default": "replicate"}, shapes(w=(8, 8)), MLP_X) == {"w": ((), "[null, null]")}


def test_without_a_default_an_unmatched_parameter_is_a_problem():
    rules = jgt.make_rules({k: v for k, v in MLP_RULES.items() if k != "default"})
    assert problems_of(mlp, rules, ABSTRACT, MLP, MLP_X) == [
        "rules: layers/bias: no rule matches this parameter of shape [3, 8], used under layers/mlp. "
        "Add a pattern under params: of that signal, or `default: replicate`"
    ]


def test_a_lone_array_may_be_the_parameters():
    fn = lambda w, x: context("block")(jnp.matmul)(x, w)  # noqa: E731
    rules = jgt.make_rules({"signals": {"block": {"params": {"**": ["fsdp", "tensor"]}}}})
    placement = jgt.place(fn, rules, ABSTRACT, jax.ShapeDtypeStruct((8, 8), jnp.float32), MLP_X)
    assert placement.params.spec == P("fsdp", "tensor")
    state = jax.eval_shape(optax.adam(1.0).init, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert placement.optimizer(state)[0].mu.spec == P("fsdp", "tensor")


# -- inputs


def test_inputs_are_sharded_by_their_rules():
    batch = {**shapes(tokens=(8, 4), mask=(8, 4), count=()), "key": jax.eval_shape(lambda: jax.random.key(0))}
    fn = lambda params, batch: (params["w"] * batch["tokens"].sum() * batch["count"], batch["mask"], batch["key"])  # noqa: E731
    rules = jgt.make_rules({"inputs": {"mask": [], "*": [["data", "fsdp"], ...]}, "default": "replicate"})
    placement = jgt.place(fn, rules, ABSTRACT, shapes(w=()), batch)
    assert {name: s.spec for name, s in placement.inputs(batch).items()} == {
        "tokens": P(("data", "fsdp"), None),
        "mask": P(None, None),
        "count": P(),
        "key": P(),
    }


def test_random_keys_of_either_kind_are_left_alone():
    batch = {"x": MLP_X, "raw": jax.eval_shape(lambda: jax.random.PRNGKey(0)), "ids": jax.ShapeDtypeStruct((4,), jnp.uint32)}
    fn = lambda params, batch: batch["x"] @ params["w"] + jax.random.normal(batch["raw"], (8, 8)) + batch["ids"].sum()  # noqa: E731
    rules = jgt.make_rules({"inputs": {"*": [["data", "fsdp"], ...]}, "default": "replicate"})
    placement = jgt.place(fn, rules, ABSTRACT, shapes(w=(8, 8)), batch)
    assert {name: s.spec for name, s in placement.inputs(batch).items()} == {
        "x": P(("data", "fsdp"), None),
        "raw": P(),
        "ids": P(("data", "fsdp")),
    }


def test_keyword_inputs_are_sharded_too():
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"})
    fn = lambda params, *, x: x @ params["w"]  # noqa: E731
    assert places(fn, {"axes": {"batch": ["data"]}, "default": "replicate"}, shapes(w=(8, 8)), x=MLP_X) == {"w": ((), "[null, null]")}
    with pytest.raises(jgt.InputError, match="dim 0 of the input x \\[3, 8\\] has size 3, which data=2 does not divide"):
        jgt.place(fn, rules, ABSTRACT, shapes(w=(8, 8)), x=jax.ShapeDtypeStruct((3, 8), jnp.float32))


# -- misfits


def test_all_misfits_come_at_once():
    def fn(params, x):
        with context("block"):
            h = tensor(x @ params["w"], "h")
            return h[:, :5]

    rules = jgt.make_rules(
        {
            "inputs": ["data"],
            "signals": {"block": {"params": {"w": ["fsdp", "tensor"]}, "tensors": {"h": [None, "tensor"]}, "out": [None, "fsdp"]}},
        }
    )
    found = problems_of(fn, rules, ABSTRACT, shapes(w=(7, 9)), jax.ShapeDtypeStruct((3, 7), jnp.float32), problems=["before"])
    assert found == [
        "before",
        "rules: w: dim 0 of the parameter w [7, 9] has size 7, which fsdp=2 does not divide. A size of 6 or 8 would fit, or fsdp of 1",
        "rules: w: dim 1 of the parameter w [7, 9] has size 9, which tensor=2 does not divide. A size of 8 or 10 would fit, or tensor of 1",
        "rules: inputs: dim 0 of the input 1 [3, 7] has size 3, which data=2 does not divide. A size of 2 or 4 would fit, or data of 1",
        "rules: h: dim 1 of the tensor h at block [3, 9] has size 9, which tensor=2 "
        "does not divide. A size of 8 or 10 would fit, or tensor of 1",
        "rules: block: dim 1 of the value that leaves block [3, 5] has size 5, which fsdp=2 "
        "does not divide. A size of 4 or 6 would fit, or fsdp of 1",
    ]


def test_an_axis_that_the_mesh_lacks_is_reported_with_all_else():
    rules = jgt.make_rules({"signals": {"layers/mlp": {"out": ["tensr", None]}, "hed": {}}, "default": "replicate"})
    found = problems_of(mlp, rules, ABSTRACT, MLP, MLP_X)
    assert any("the mesh has no axis 'tensr'. Did you mean 'tensor'?" in p for p in found)
    assert any("hed: no signal of the program matches. Did you mean 'head'?" in p for p in found)


def test_an_abstract_mesh_places_for_hardware_that_is_not_here():
    mesh = jgt.abstract_mesh({"data": 64, "fsdp": 64, "tensor": 8})
    params = shapes(w=(8192, 8192))
    rules = jgt.make_rules({"signals": {"block": {"params": {"w": ["fsdp", "tensor"]}, "out": ["data", None]}}})
    fn = lambda p, x: context("block")(jnp.matmul)(x, p["w"])  # noqa: E731
    placement = jgt.place(fn, rules, mesh, params, jax.ShapeDtypeStruct((128, 8192), jnp.float32))
    assert placement.parameters[0].bytes_per_device(mesh) == 8192 * 8192 * 4 // 512


def test_place_takes_the_sharded_function_too():
    rules = jgt.make_rules(MLP_RULES)
    sharded = jgt.shard(mlp, rules, jgt.make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    assert jgt.place(sharded, rules, ABSTRACT, MLP, MLP_X) == jgt.place(mlp, rules, ABSTRACT, MLP, MLP_X)


def test_a_decorated_function_is_not_the_one_below():
    rules = jgt.make_rules(MLP_RULES)
    sharded = jgt.shard(mlp, rules, jgt.make_mesh(SIZES))

    @functools.wraps(sharded)
    def batched(params, batch):
        return sharded(params, batch["x"])

    assert (
        jgt.place(batched, rules, jgt.make_mesh(SIZES), MLP, {"x": MLP_X}).params
        == jgt.place(mlp, rules, jgt.make_mesh(SIZES), MLP, MLP_X).params
    )


def test_a_part_of_the_program_may_be_placed_with_rules_for_more():
    rules = jgt.make_rules({**MLP_RULES, "params": {"elsewhere": ["fsdp", None]}})
    with pytest.raises(jgt.InputError, match="params: elsewhere: no parameter matches"):
        jgt.place(mlp, rules, ABSTRACT, MLP, MLP_X)
    part = jgt.place(mlp, rules, ABSTRACT, MLP, MLP_X, partial=True)
    assert part.params == jgt.place(mlp, jgt.make_rules(MLP_RULES), ABSTRACT, MLP, MLP_X).params


def test_a_placement_knows_the_tensors_of_the_program():
    fn = lambda params, x: tensor(tensor(x @ params["w"], "h") * 2, "logits")  # noqa: E731
    placement = jgt.place(fn, jgt.make_rules({"default": "replicate"}), ABSTRACT, shapes(w=(8, 8)), MLP_X)
    assert placement.tensors == ("h", "logits")
