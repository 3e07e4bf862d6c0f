"""The layout of the parameters and the optimizer state of Flax modules, and their initialization in that layout."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from placements import ABSTRACT, BLOCK_RULES, MLP, MLP_RULES, MLP_X, SIZES, TOKENS, mlp, multiply, places, problems_of, shapes
from small_transformers import RULES, NnxTransformer, Transformer, cross_entropy

import jgt
from jgt.signal import context

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


@pytest.mark.parametrize(
    ("axis", "length", "spec"),
    [(0, 3, "[null, fsdp, tensor]"), (1, 3, "[fsdp, null, tensor]"), (2, 3, "[fsdp, tensor, null]"), (1, 1, "[fsdp, null, tensor]")],
)
def test_linen_with_a_scan_over_any_dim(axis, length, spec):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, h, _):
            return multiply(h, self.param("w", nn.initializers.ones, (8, 8))), None

    model = nn.scan(Layer, variable_axes={"params": axis}, split_rngs={"params": True}, length=length)()
    params = jax.eval_shape(model.init, jax.random.key(0), MLP_X, None)
    assert places(lambda p, x: model.apply(p, x, None)[0], BLOCK_RULES, params, MLP_X) == {"params/w": (("block",), spec)}


def test_a_tied_embedding_needs_a_rule_of_its_own():
    model = Transformer(tied=True)
    signals = {name: rule for name, rule in RULES["signals"].items() if name != "head"}
    params = linen_params(model)
    (problem,) = problems_of(linen_loss(model), jgt.make_rules({**RULES, "signals": signals}), ABSTRACT, params, TOKENS)
    assert "the parameter params/embed/embedding is used under several signals whose rules differ: embed (rules), head (no rule)" in problem
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


class Wrapping(nnx.Module):
    """A linear layer, with a transformation around it or a module after it."""

    def __init__(self, around=None, behind=None):
        self.inner = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.around = around or (lambda fn: fn)
        self.behind = behind

    def __call__(self, x):
        h = self.around(lambda inner, x: context("block")(inner)(x))(self.inner, x)
        return h if self.behind is None else self.behind(h)


WRAPPING_RULES = {"signals": {"block": {"params": {"kernel": ["fsdp", "tensor"]}}}, "default": "replicate"}


@pytest.mark.parametrize("around", [nnx.remat, nnx.jit])
def test_a_module_that_passes_through_a_transform_is_not_changed(around):
    model = Wrapping(around=around)
    assert places(lambda model, x: model(x), WRAPPING_RULES, model, MLP_X)["inner/kernel"] == (("block",), "[fsdp, tensor]")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda p, flags: p.update(w=p["w"] * 2), "w"),
        (lambda p, flags: p.update(w=jnp.zeros((8, 8))), "w"),
        (lambda p, flags: p.update(v=p["w"]), "the arguments' structure"),
        (lambda p, flags: flags.update(n=2), "n"),
    ],
    ids=["value", "constant", "structure", "flag"],
)
def test_any_argument_that_is_changed_is_refused(change, names):
    def fn(params, flags):
        change(params, flags)
        return params["w"]

    with pytest.raises(ValueError, match=rf"changes its arguments in place \({names}\)"):
        places(fn, {"default": "replicate"}, shapes(w=(8, 8)), {"n": 1})


def test_one_array_at_two_places_has_one_layout():
    array = jnp.ones((8, 8))
    fn = lambda params, x: context("b")(jnp.matmul)(context("a")(jnp.matmul)(x, params["a"]), params["b"])  # noqa: E731
    rules = lambda spec: {"signals": {"a": {"params": {"a": ["fsdp", None]}}, "b": {"params": {"b": spec}}}}  # noqa: E731
    (problem,) = problems_of(fn, jgt.make_rules(rules([None, "fsdp"])), ABSTRACT, {"a": array, "b": array}, MLP_X)
    assert problem.startswith(
        "rules: b: this array is a too, and the rules lay the two out differently: [null, fsdp] and [fsdp, null]. Pass it once"
    )
    assert len(places(fn, rules(["fsdp", None]), {"a": array, "b": array}, MLP_X)) == 2
    assert len(places(fn, rules([None, "fsdp"]), {"a": array, "b": array + 1}, MLP_X)) == 2
    assert len(places(fn, rules([None, "fsdp"]), dict.fromkeys("ab", MLP_X), MLP_X)) == 2


def test_a_tied_nnx_module_has_one_layout():
    model = Wrapping()
    model.again = model.inner
    fn = lambda model, x: context("again")(model.again)(model(x))  # noqa: E731
    rules = {"signals": {**WRAPPING_RULES["signals"], "again": {"params": {"kernel": ["tensor", "fsdp"]}}}, "default": "replicate"}
    found = problems_of(fn, jgt.make_rules(rules), ABSTRACT, model, MLP_X)
    assert any("kernel: this array is again/kernel too" in problem for problem in found)


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
    rules = {
        "optimizer": {"up": [["data", "fsdp"], None]},
        "signals": {"head": {"optimizer": {"head": ["data", None]}}},
        "default": "replicate",
    }
    placement = jgt.place(mlp, jgt.make_rules(rules), ABSTRACT, MLP, MLP_X)
    assert {s.spec for s in jax.tree.leaves(placement.params)} == {P(None, None), P(None, None, None)}
    state = placement.optimizer(jax.eval_shape(optax.adam(1.0).init, MLP))
    for tree in (placement.gradients, state[0].mu, state[0].nu):
        assert tree["layers"]["up"].spec == P(None, ("data", "fsdp"), None)
        assert tree["head"].spec == P("data", None)
        assert tree["layers"]["down"].spec == P(None, None, None)


def test_an_optimizer_rule_is_passed_over_where_its_spec_does_not_fit():
    params = {"layers": shapes(up=(3, 8, 6), down=(3, 6, 8), bias=(3, 8)), **shapes(head=(8, 4), odd=(3, 8), scale=())}
    fn = lambda params, x: mlp(params, x) * params["scale"] + params["odd"].sum()  # noqa: E731
    rules = {
        "params": {"up": [None, "tensor"], "odd": [None, "tensor"]},
        "optimizer": {"**": [["data", "fsdp"], ...]},
        "default": "replicate",
    }
    placement = jgt.place(fn, jgt.make_rules(rules), ABSTRACT, params, MLP_X)
    specs = {p.path: (p.spec, s.spec) for p, s in zip(placement.parameters, jax.tree.leaves(placement.gradients), strict=True)}
    both = ("data", "fsdp")
    assert specs == {
        "head": ("[null, null]", P(both, None)),
        "layers/bias": ("[null, null]", P(None, both)),
        "layers/down": ("[null, null, null]", P(None, None, None)),
        "layers/up": ("[null, null, tensor]", P(None, both, None)),
        "odd": ("[null, tensor]", P(None, "tensor")),
        "scale": ("[]", P()),
    }


def test_an_optimizer_rule_that_fits_nowhere_is_reported():
    rules = jgt.make_rules({"optimizer": {"head": [["data", "fsdp", "tensor"], None, None]}, "default": "replicate"})
    assert problems_of(mlp, rules, ABSTRACT, MLP, MLP_X) == [
        "rules: optimizer: head: no parameter matches that the spec fits. Remove the rule or correct its name"
    ]


def test_the_state_of_an_nnx_model_is_placed():
    graph, params = nnx.split(nnx_model())
    loss = lambda params, tokens: cross_entropy(nnx.merge(graph, params)(tokens), tokens)  # noqa: E731
    placement = jgt.place(loss, jgt.make_rules(RULES), ABSTRACT, params, TOKENS)
    state = placement.optimizer(jax.eval_shape(optax.adam(1.0).init, params))
    assert jax.tree.leaves(state[0].mu) == jax.tree.leaves(placement.params)


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


def test_init_of_a_part_takes_rules_for_more():
    rules = jgt.make_rules({**MLP_RULES, "params": {"elsewhere": ["fsdp", None]}})
    mesh = jgt.make_mesh(SIZES)
    params = jgt.init(init_fn, rules, mesh, jax.random.key(0), loss=mlp, batch=MLP_X, partial=True)
    assert jax.tree.map(lambda x: x.sharding, params) == jgt.place(mlp, rules, mesh, MLP, MLP_X, partial=True).params
    with pytest.raises(jgt.InputError, match="params: elsewhere: no parameter matches"):
        jgt.init(init_fn, rules, mesh, jax.random.key(0), loss=mlp, batch=MLP_X)


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


def test_what_is_no_array_stays_as_it_is_where_arrays_are_born():
    # As in a module of Equinox, whose fields are leaves.
    mesh = jgt.make_mesh({"fsdp": 8})
    fn = lambda p, x: p["activation"](x @ p["w"]).sum() * p["scale"] if p["is_on"] else x  # noqa: E731
    make = lambda key: {"w": jax.random.normal(key, (16, 8)), "activation": jnp.tanh, "is_on": True, "scale": 2.0}  # noqa: E731
    rules = {"params": {"w": ["fsdp", None]}, "default": "replicate"}
    params = jgt.init(make, rules, mesh, jax.random.key(0), loss=fn, batch=jnp.ones((8, 16)))
    assert params["activation"] is jnp.tanh and params["is_on"] is True and params["scale"] == 2.0
    assert params["w"].sharding.spec == jax.P("fsdp", None)
    np.testing.assert_array_equal(params["w"], make(jax.random.key(0))["w"])


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
