"""The layout of parameters, gradients, optimizer state and inputs; none of them is ever created whole on one device."""

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


multiply = context("block")(jnp.matmul)
BLOCK_RULES = {"signals": {"block": {"params": {"w": ["fsdp", "tensor"]}}}}


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
