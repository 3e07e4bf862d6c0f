"""`jgt.verify` finds programs that were rewritten wrongly, says where, and has nothing to say about right ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jgt
from jgt.program import constraints
from jgt.program.tracing import tensor_name
from jgt.sharding.partitioner import with_faults
from jgt.signal import context, tensor

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
ROWS, EMBED, FFN, LAYERS = 8, 8, 16, 2


def loss(params, x):
    """Two layers of attention-like mixing and an MLP, in a scan, and a head."""
    with context("embed"):
        h = tensor(x @ params["embed"], "rows")

    def layer(h, p):
        with context("mix"):
            h = h + tensor(jnp.tanh(h @ p["mix"]), "mixed")
        with context("mlp"):
            h = h + tensor(nnx.relu(h @ p["up"]), "hidden") @ p["down"]
        return h, None

    with context("layers"):
        h, _ = lax.scan(layer, h, params["layers"])
    with context("head"):
        return jnp.mean(jnp.square(tensor(h @ params["head"], "logits")))


RULES = {
    "axes": {"batch": ["data", "fsdp"]},
    "signals": {
        "embed": {"params": {"embed": ["fsdp", "tensor"]}, "tensors": {"rows": ["batch", None]}},
        "layers/mix": {"params": {"mix": ["fsdp", "tensor"]}, "tensors": {"mixed": ["batch", None]}, "out": ["batch", None]},
        "layers/mlp": {
            "params": {"up": ["fsdp", "tensor"], "down": ["tensor", "fsdp"]},
            "tensors": {"hidden": ["batch", "tensor"]},
            "out": ["batch", None],
        },
        "head": {"params": {"head": ["fsdp", None]}, "tensors": {"logits": ["batch", None]}},
    },
}


def draw(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.fixture(scope="module")
def params():
    layers = {"mix": draw((LAYERS, EMBED, EMBED), 1), "up": draw((LAYERS, EMBED, FFN), 2), "down": draw((LAYERS, FFN, EMBED), 3)}
    return {"embed": draw((EMBED, EMBED), 0), "layers": layers, "head": draw((EMBED, 4), 4)}


@pytest.fixture(scope="module")
def mesh():
    return jgt.make_mesh(SIZES)


X = draw((ROWS, EMBED), 5)


def test_a_right_layout_changes_nothing(params, mesh):
    found = jgt.verify(loss, RULES, mesh, params, X, optimizer=optax.adam(1e-3))
    assert found.is_right
    assert found.first == ""
    # The loss and a gradient for each parameter, and after an update each parameter, two moments of each, and a count.
    assert found.num_compared == 1 + 5 + 5 + 2 * 5 + 1
    assert found.largest < 1e-5
    assert "changes no number" in str(found)


WRONG = {
    "other rows": lambda x: jnp.roll(x, 1, axis=0),
    "a sum over two devices": lambda x: x * 2.0,
    "rows twice": lambda x: x.at[0].set(x[-1]),
}
# The values at which a rule puts a constraint, and what a message calls them. The signals of a scan have the scan's before theirs.
SITES = {
    "rows": "tensor rows of signal embed",
    "mixed": "tensor mixed of signal layers/mix",
    "hidden": "tensor hidden of signal layers/mlp",
    "logits": "tensor logits of signal head",
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_rewrite_is_found_with_its_signal_and_its_tensor(how, site, backward, params, mesh, monkeypatch):
    """24 rewrites: at each named tensor, a permutation, a scale or a copy in the place of the value or of its cotangent."""
    right = constraints.constraint_equations

    def wrong(var, ahead, behind, like):

        if like is None or tensor_name(like) != site:
            return right(var, ahead, behind, like)

        @jax.custom_vjp
        def change(x):
            return x if backward else WRONG[how](x)

        change.defvjp(lambda x: (change(x), None), lambda _, ct: (WRONG[how](ct) if backward else ct,))
        return constraints.traced_equations(change, var, like)

    monkeypatch.setattr("jgt.sharding.rewrite.constraint_equations", wrong)
    found = jgt.verify(loss, RULES, mesh, params, X)
    assert not found.is_right
    names = list(SITES.values())
    at = names.index(SITES[site])
    if backward:
        # The cotangent is wrong before the tensor, so the first wrong one is at an earlier tensor.
        assert any(name in found.first for name in [names[at], *names[:at]]), repr(found.first)
        assert "the cotangent" in found.first
    elif how == "other rows" and site == "logits":
        # A mean over rows has no order: the value of the loss is right, and the gradient wrong.
        assert f"the cotangent of {SITES[site]}" in found.first
    else:
        # The wrong equations follow the tensor, so the first wrong value is the next one, or the result.
        after = [*names[at + 1 :], "output of signal layers", "output of signal head", "output of signal embed"]
        assert "the value" in found.first, found.first
        assert any(name in found.first for name in after), found.first


@pytest.mark.parametrize("what", ["a parameter", "the batch"])
@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_argument_is_found(how, what, params, mesh, monkeypatch):
    """6 more: the arguments have no equation before them."""
    right = constraints.constraint_equations
    shape = (FFN, EMBED) if what == "a parameter" else X.shape

    def wrong(var, ahead, behind, like):
        from jgt.program import jaxpr as jx

        new = right(var, ahead, behind, like)
        if like is not None or jx.shape_of(var)[-2:] != shape or (what == "a parameter") != (len(jx.shape_of(var)) == 3):
            return new
        return constraints.traced_equations(lambda x: jnp.swapaxes(WRONG[how](jnp.swapaxes(x, 0, -2)), 0, -2), var, None)

    monkeypatch.setattr("jgt.sharding.rewrite.constraint_equations", wrong)
    found = jgt.verify(loss, RULES, mesh, params, X)
    assert not found.is_right
    assert "of signal" in found.first


def test_the_faults_of_the_partitioner_are_found(mesh):
    def mlp(params, x):
        with context("mlp"):
            return jnp.mean((tensor(jnp.tanh(x @ params["a"]), "h") @ params["b"] - 1) ** 2)

    spec = ["fsdp", "tensor"]
    rules = {
        "axes": {"batch": ["data", "fsdp"]},
        "signals": {"mlp": {"params": {"a": spec, "b": spec}, "tensors": {"*": ["batch", "...", "tensor"]}}},
    }
    params = {"a": draw((8, 16), 0), "b": draw((16, 4), 1)}
    assert jgt.verify(mlp, rules, mesh, params, draw((16, 8), 2)).avoided
    with with_faults():
        found = jgt.verify(mlp, rules, mesh, params, draw((16, 8), 2))
    assert [difference.what for difference in found.differences] == ["gradient of a [8, 16] [fsdp, tensor], used in mlp"]
    assert "the cotangent of tensor h of signal mlp" in found.first


def test_a_pipeline_is_compared_too(params):
    mesh = jgt.make_mesh({"data": 2, "stage": 2, "tensor": 2})
    rules = {
        "axes": {"batch": ["data"]},
        "signals": {
            "layers/mlp": {"params": {"up": [None, "tensor"], "down": ["tensor", None]}, "tensors": {"hidden": ["batch", "tensor"]}}
        },
        "default": "replicate",
    }
    pipeline = jgt.Pipeline(signal="layers", microbatches=2)
    found = jgt.verify(loss, rules, mesh, params, X, pipeline=pipeline, optimizer=optax.sgd(0.1))
    assert found.is_right
    assert found.num_compared == 1 + 5 + 5


def test_a_module_with_statistics_is_compared_whole(mesh):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)

    def run(module, x):
        with context("net"):
            return jnp.mean(module.norm(module.up(x)) ** 3)

    rules = {"signals": {"net": {"params": {"up/kernel": [None, "tensor"]}}}, "inputs": [["data", "fsdp"], "..."], "default": "replicate"}
    found = jgt.verify(run, rules, mesh, Net(nnx.Rngs(0)), draw((8, 8), 1))
    assert found.is_right
    # The loss, four parameters, and the new mean and variance.
    assert found.num_compared == 1 + 4 + 2


def test_random_numbers_stand_for_shapes(params, mesh):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, X))
    found = jgt.verify(loss, RULES, mesh, *shapes)
    assert found.is_right
    assert found.largest > 0


def test_without_signals_the_operation_is_named(mesh):
    """The start is drawn behind the end of the rows, where XLA loses the update (openxla/xla#49118)."""

    def put(params, x, start):
        h = jnp.tanh(x @ params["w"])
        return jnp.mean(lax.dynamic_update_slice(h, h[:1] * 5, (start, 0)) ** 2)

    rules = {"inputs": {"x": [["data", "fsdp"], None], "start": []}, "default": "replicate"}
    with with_faults():
        found = jgt.verify(put, rules, mesh, {"w": draw((8, 8), 0)}, draw((16, 8), 1), jax.ShapeDtypeStruct((), jnp.int32))
    assert not found.is_right
    assert "the value of dynamic_update_slice at" in found.first
    assert "test_verification.py" in found.first
    assert all(difference.expected != difference.found for difference in found.differences)
    assert f"{found.differences[0].found:.4g} instead of {found.differences[0].expected:.4g}" in str(found)


def test_a_mesh_without_devices_is_an_error(params):
    with pytest.raises(jgt.InputError, match="the mesh has no devices to compute on"):
        jgt.verify(loss, RULES, jgt.abstract_mesh(SIZES), params, X)


def test_a_value_that_is_not_finite_on_one_side_differs(mesh):
    from jgt.api.reference import errors_of

    assert errors_of({"x": np.array([1.0, np.inf])}, {"x": np.array([1.0, np.inf])}) == {"x": 0.0}
    assert errors_of({"x": np.array([1.0, 2.0])}, {"x": np.array([1.0, np.nan])}) == {"x": float("inf")}
