"""Where parameters, gradients, optimizer state and inputs go; and that nothing is ever made whole on one device."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from transformers import RULES, SEQ, NnxTransformer, Transformer, cross_entropy

import jgt
from jgt.signal import context, tensor

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
ABSTRACT = jgt.abstract_mesh(SIZES)
TOKENS = jax.ShapeDtypeStruct((8, SEQ), jnp.int32)


def shapes(**arrays):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in arrays.items()}


def places(fn, rules, *args, mesh=ABSTRACT, **kwargs):
    """The signals and spec of every parameter."""
    placement = jgt.place(fn, jgt.make_rules(rules), mesh, *args, **kwargs)
    return {p.path: (p.signals, p.spec) for p in placement.parameters}


def problems_of(*args, **kwargs):
    with pytest.raises(jgt.InputError) as caught:
        jgt.place(*args, **kwargs)
    return list(caught.value.problems)


# -- parameters → signals


def mlp(params, x):
    with context("layers"):

        def layer(h, w):
            with context("mlp"):
                return jnp.tanh(h @ w["up"]) @ w["down"] + w["bias"][None], None

        h, _ = jax.lax.scan(layer, x, params["layers"])
    with context("head"):
        return h @ params["head"]


MLP = {"layers": shapes(up=(3, 8, 16), down=(3, 16, 8), bias=(3, 8)), **shapes(head=(8, 4))}
MLP_X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
MLP_RULES = {
    "axes": {"batch": ["data"]},
    "signals": {
        "layers/mlp": {"params": {"up": ["fsdp", "tensor"], "down": ["tensor", "fsdp"]}, "out": ["batch", None]},
        "head": {"params": {"head": ["fsdp", None]}},
    },
    "default": "replicate",
}


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


# -- Flax


def linen_loss(model):
    return lambda params, tokens: cross_entropy(model.apply(params, tokens), tokens)


def linen_params(model):
    return jax.eval_shape(model.init, jax.random.key(0), TOKENS)


LAYER = {
    "attn/q_proj/kernel": ("layers/attn", "fsdp, tensor"),
    "attn/out/kernel": ("layers/attn", "tensor, fsdp"),
    "mlp/up/kernel": ("layers/mlp", "fsdp, tensor"),
    "mlp/down/kernel": ("layers/mlp", "tensor, fsdp"),
    "mlp/up/bias": ("layers/mlp", "null"),
    "norm1/scale": ("layers", "null"),
}


def test_linen_with_scan():
    model = Transformer(scan=True)
    found = places(linen_loss(model), RULES, linen_params(model), TOKENS)
    assert found["params/embed/embedding"] == (("embed",), "[tensor, fsdp]")
    assert found["params/unembed/kernel"] == (("head",), "[fsdp, tensor]")
    for path, (signal, spec) in LAYER.items():
        assert found[f"params/layers/{path}"] == ((signal,), f"[null, {spec}]")


def test_linen_with_a_loop():
    model = Transformer(scan=False)
    found = places(linen_loss(model), RULES, linen_params(model), TOKENS)
    for path, (signal, spec) in LAYER.items():
        assert found[f"params/layer_1/{path}"] == ((signal,), f"[{spec}]")


def test_a_tied_embedding_needs_a_rule_of_its_own():
    model = Transformer(tied=True)
    signals = {name: rule for name, rule in RULES["signals"].items() if name != "head"}
    params = linen_params(model)
    (problem,) = problems_of(linen_loss(model), jgt.make_rules({**RULES, "signals": signals}), ABSTRACT, params, TOKENS)
    assert (
        "the parameter params/embed/embedding is used under several signals that say different things: embed (rules), head (no rule)"
        in problem
    )
    assert "write 'embedding' under params: at the top of the file" in problem
    signals["embed"] = {"out": ["batch", None, None]}
    found = places(linen_loss(model), {**RULES, "signals": signals, "params": {"embedding": ["tensor", "fsdp"]}}, params, TOKENS)
    assert found["params/embed/embedding"] == (("embed", "head"), "[tensor, fsdp]")


def nnx_model():
    return nnx.eval_shape(lambda: NnxTransformer(nnx.Rngs(0)))


def test_nnx_split_and_merged():
    graph, params = nnx.split(nnx_model())
    loss = lambda params, tokens: cross_entropy(nnx.merge(graph, params)(tokens), tokens)  # noqa: E731
    found = places(loss, RULES, params, TOKENS)
    assert found["embed/embedding"] == (("embed",), "[tensor, fsdp]")
    for path, (signal, spec) in LAYER.items():
        assert found[f"blocks/1/{path}"] == ((signal,), f"[{spec}]")


def test_an_nnx_module_as_first_argument():
    loss = lambda model, tokens: cross_entropy(model(tokens), tokens)  # noqa: E731
    found = places(loss, RULES, nnx_model(), TOKENS)
    assert found["unembed/kernel"] == (("head",), "[fsdp, tensor]")
    assert found["blocks/0/mlp/up/kernel"] == (("layers/mlp",), "[fsdp, tensor]")


def test_linen_metadata_of_its_own_does_not_disturb():
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.with_partitioning(nn.initializers.ones, ("x", "y")), (8, 8))
            return context("block")(jnp.matmul)(x, w)

    params = jax.eval_shape(Boxed().init, jax.random.key(0), MLP_X)
    found = places(Boxed().apply, {"signals": {"block": {"params": {"w": ["fsdp", "tensor"]}}}}, params, MLP_X)
    assert found == {"params/w": (("block",), "[fsdp, tensor]")}


# -- optimizer state


def specs_of(optimizer, params=MLP, rules=MLP_RULES):
    placement = jgt.place(mlp, jgt.make_rules(rules), ABSTRACT, params, MLP_X)
    state = jax.eval_shape(optimizer.init, params)
    return state, jax.tree.map(lambda s: s.spec, placement.optimizer(state)), jax.tree.map(lambda s: s.spec, placement.params)


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        (optax.adamw(1.0), lambda s: (s[0].mu, s[0].nu)),
        (optax.sgd(1.0, momentum=0.9), lambda s: (s[0].trace,)),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1.0)), lambda s: (s[1][0].mu,)),
        (optax.MultiSteps(optax.adam(1.0), 4), lambda s: (s.acc_grads, s.inner_opt_state[0].mu, s.inner_opt_state[0].nu)),
    ],
    ids=["adamw", "momentum", "chain", "MultiSteps"],
)
def test_moments_go_where_their_parameters_are(optimizer, moments):
    state, specs, expected = specs_of(optimizer)
    for tree in moments(specs):
        assert tree == expected
    others = [s for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True) if x.ndim == 0]
    assert all(s == P() for s in others)


def test_state_of_another_shape_is_replicated():
    params = {**MLP, "head": jax.ShapeDtypeStruct((256, 128), jnp.float32)}
    rules = jgt.make_rules({"params": {"head": ["fsdp", "tensor"]}, "default": "replicate"})
    placement = jgt.place(lambda p, x: x @ p["head"], rules, ABSTRACT, params, jax.ShapeDtypeStruct((4, 256), jnp.float32))
    state = jax.eval_shape(optax.adafactor(1.0, min_dim_size_to_factor=64).init, params)
    (factored,) = [s for s in jax.tree.leaves(placement.optimizer(state), is_leaf=lambda s: hasattr(s, "v_row")) if hasattr(s, "v_row")]
    assert (factored.v_row["head"].spec, factored.v_col["head"].spec) == (P(), P())


def test_a_parameter_whose_name_ends_another_is_not_mixed_up():
    params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32), "deep": shapes(w=(8, 8)), **shapes(xw=(8, 8))}
    rules = jgt.make_rules({"params": {"deep/w": ["tensor", None], "xw": [None, "tensor"], "w": ["fsdp", None]}})
    placement = jgt.place(lambda p, x: x @ p["w"] @ p["deep"]["w"] @ p["xw"], rules, ABSTRACT, params, MLP_X)
    mu = placement.optimizer(jax.eval_shape(optax.adam(1.0).init, params))[0].mu
    assert jax.tree.map(lambda s: s.spec, mu) == jax.tree.map(lambda s: s.spec, placement.params)


def test_optimizer_rules_shard_state_and_gradients_only():
    rules = {"optimizer": {"up": [["data", "fsdp"], None]}, "signals": {"head": {"optimizer": {"head": ["data", None]}}}, "default": "replicate"}
    placement = jgt.place(mlp, jgt.make_rules(rules), ABSTRACT, MLP, MLP_X)
    assert {s.spec for s in jax.tree.leaves(placement.params)} == {P(None, None), P(None, None, None)}
    state = placement.optimizer(jax.eval_shape(optax.adam(1.0).init, MLP))
    for tree in (placement.gradients, state[0].mu, state[0].nu):
        assert tree["layers"]["up"].spec == P(None, ("data", "fsdp"), None)
        assert tree["head"].spec == P("data", None)
        assert tree["layers"]["down"].spec == P(None, None, None)


def test_the_state_of_an_nnx_model_is_placed():
    graph, params = nnx.split(nnx_model())
    loss = lambda params, tokens: cross_entropy(nnx.merge(graph, params)(tokens), tokens)  # noqa: E731
    placement = jgt.place(loss, jgt.make_rules(RULES), ABSTRACT, params, TOKENS)
    state = placement.optimizer(jax.eval_shape(optax.adam(1.0).init, params))
    assert jax.tree.leaves(state[0].mu) == jax.tree.leaves(placement.params)


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
        "rules: h: dim 1 of the tensor h at block [3, 9] has size 9, which tensor=2 does not divide. A size of 8 or 10 would fit, or tensor of 1",
        "rules: block: dim 1 of the value that leaves block [3, 5] has size 5, which fsdp=2 does not divide. A size of 4 or 6 would fit, or fsdp of 1",
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


# -- init


def init_fn(key):
    params = jax.tree.map(lambda s: jnp.zeros(s.shape), MLP)
    params["layers"]["up"] = jax.random.uniform(key, MLP["layers"]["up"].shape)
    return params


def born(sizes, devices=None, optimizer=None):
    mesh = jgt.make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **sizes}, devices=devices)
    return jgt.init(init_fn, jgt.make_rules(MLP_RULES), mesh, jax.random.key(0), loss=mlp, batch=MLP_X, optimizer=optimizer)


@functools.cache
def born_on_one_device():
    return born({}, devices=jax.devices()[:1])


def test_parameters_and_state_are_born_sharded():
    params, state = born(SIZES, optimizer=optax.adam(1.0))
    placement = jgt.place(mlp, jgt.make_rules(MLP_RULES), jgt.make_mesh(SIZES), MLP, MLP_X)
    assert jax.tree.map(lambda x: x.sharding, params) == placement.params
    assert jax.tree.map(lambda x: x.sharding.spec, state) == jax.tree.map(lambda s: s.spec, placement.optimizer(state))
    assert {s.data.shape for s in params["layers"]["up"].addressable_shards} == {(3, 4, 8)}
    assert {s.data.shape for s in state[0].mu["head"].addressable_shards} == {(4, 4)}


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"data": 2, "tensor": 4}, {"data": 8}, SIZES], ids=str)
def test_values_are_the_same_on_every_mesh(sizes):
    count = int(np.prod(list(sizes.values())))
    jax.tree.map(np.testing.assert_array_equal, born(sizes, devices=jax.devices()[:count]), born_on_one_device())


def test_no_device_ever_holds_a_whole_parameter():
    mesh = jgt.make_mesh({"fsdp": 8})
    big = jax.ShapeDtypeStruct((1024, 2048), jnp.float32)
    rules = jgt.make_rules({"signals": {"block": {"params": {"w": ["fsdp", None]}}}})
    fn = lambda p, x: context("block")(jnp.matmul)(x, p["w"])  # noqa: E731
    make = lambda key: {"w": jax.random.normal(key, big.shape)}  # noqa: E731
    placement = jgt.place(fn, rules, mesh, {"w": big}, jax.ShapeDtypeStruct((1, 1024), jnp.float32))
    memory = jax.jit(make, out_shardings=placement.params).lower(jax.random.key(0)).compile().memory_analysis()
    local = big.size * 4 // 8
    assert memory.output_size_in_bytes < local * 1.01 + 1024
    assert memory.temp_size_in_bytes <= local * 4
    params = jgt.init(make, rules, mesh, jax.random.key(0), loss=fn, batch=jax.ShapeDtypeStruct((1, 1024), jnp.float32))
    assert {s.data.shape for s in params["w"].addressable_shards} == {(128, 2048)}


def test_init_reports_what_does_not_fit_before_anything_is_made():
    with pytest.raises(jgt.InputError, match="dim 1 of the parameter layers/up"):
        jgt.init(
            lambda: (
                pytest.fail("made") if not isinstance(jnp.zeros(()), jax.core.Tracer) else jax.tree.map(lambda s: jnp.zeros(s.shape), MLP)
            ),
            jgt.make_rules(MLP_RULES),
            jgt.make_mesh({"data": 1, "tensor": 1, "fsdp": 3}, devices=jax.devices()[:3]),
            loss=mlp,
            batch=MLP_X,
        )
