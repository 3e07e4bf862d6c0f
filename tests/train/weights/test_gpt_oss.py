"""gpt-oss (sinks, clamped experts with biases, tensors that alternate): its gradients are torch's, and the same on meshes and in stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDENS, config_of, expected, loaded, variables_of

import jgt
from jgt import document
from train.config import load
from train.models.decoder import build
from train.setup import prepare
from train.weights.described import published
from train.weights.load import open_files

NAME = "gpt_oss"
ATTENTION = {
    "params": {"*_proj/kernel": ["fsdp", "tensor"], "*_proj/bias": ["tensor"], "out/kernel": ["tensor", "fsdp"], "sinks": ["tensor"]},
    "tensors": {"{q,k,v,heads}": ["batch", None, "tensor", None]},
}
MIXTURE = {
    "params": {
        "experts/{gate,up}": ["expert", "fsdp", "tensor"],
        "experts/down": ["expert", "tensor", "fsdp"],
        "expert_biases/*": ["expert", None],
    },
    "experts": {"axis": "expert"},
}
EXPERTS = {"axes": {"batch": ["fsdp", "expert"]}, "signals": {"layers/attn": ATTENTION, "layers/moe": MIXTURE}, "default": "replicate"}
STAGES = {"axes": {"batch": ["fsdp"]}, "signals": {"layers/attn": ATTENTION}, "default": "replicate"}


def along(method):
    """Rules by which devices have a part of each sequence, and of the heads."""
    split = {
        "params": {"sinks": ["tensor"]},
        "tensors": {"{q,k,v,heads}": ["batch", "seq", "tensor", None]},
        "context": {"axis": "seq", "method": method},
    }
    return {"axes": {"batch": ["data"]}, "inputs": ["batch", "seq", "..."], "signals": {"layers/attn": split}, "default": "replicate"}


LAYOUTS = {
    "experts": ({"fsdp": 2, "tensor": 2, "expert": 2}, EXPERTS, None),
    "shipped": ({"data": 2, "fsdp": 2, "expert": 2}, "jgt:experts", None),
    "stages": ({"fsdp": 2, "stage": 2, "tensor": 2}, STAGES, {"signal": "layers", "microbatches": 2, "schedule": "1f1b"}),
    "ring": ({"data": 2, "seq": 2, "tensor": 2}, along("ring"), None),
    "gather": ({"data": 2, "seq": 2, "tensor": 2}, along("gather"), None),
    "ulysses": ({"data": 4, "seq": 2, "tensor": 1}, along("ulysses"), None),
}


def setup_of(tiny_file, mesh, rules, pipeline, **changes):
    keys = published(GOLDENS / NAME).keys
    # The balance of a microbatch is not that of the batch.
    experts = {**keys["experts"], "balance": "none"}
    tree = document.read(tiny_file).plain() | {"model": {**keys, "experts": experts, "seq": 96, **changes}, "mesh": mesh, "rules": rules}
    tree |= {} if pipeline is None else {"pipeline": pipeline}
    tree["train"]["batch"] = 8
    return prepare(load(tree), devices=jax.devices()[: int(np.prod(list(mesh.values())))])


def differentiated(setup):
    """The loss of the golden tokens, and its gradient, in the model's shapes."""
    tokens, state = np.tile(expected(NAME)[0], (4, 1)), setup.init()
    params = setup.stored_params(jax.device_put(loaded(NAME, config_of(NAME)), setup.storage.placement.params))
    params, frozen = setup.trained.split(params)
    weights = np.ones(tokens.shape, np.float32)
    # The last token has none behind it.
    weights[:, -1] = 0
    batch = {"inputs": tokens, "targets": np.roll(tokens, -1, axis=1), "weights": weights / weights.sum()}

    def run(params, frozen, variables, batch):
        (value, _), gradient, _ = setup.gradients.differentiate(setup.objective.beside(frozen), params, variables, batch)
        return value, gradient

    placed = jax.device_put(batch, setup.batch_shardings)
    value, gradient = jax.jit(run)(params, frozen, state.variables, placed)
    gradient = jax.jit(setup.storage.left)(gradient)
    return float(value), {jgt.path_text(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(gradient)}


@pytest.fixture(scope="module")
def alone(tiny_file):
    """The loss and the gradient on one device."""
    return differentiated(setup_of(tiny_file, {"data": 1}, None, None))


def test_the_gradient_of_each_tensor_is_that_of_torch(alone):
    config, (value, gradient) = config_of(NAME), alone
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))[0]
    sources = open_files(published(GOLDENS / NAME), config, shapes).sources
    tensors = {}
    for path, x in gradient.items():
        source = sources[path]
        for place in np.ndindex(*x.shape[: source.num_stacked]):
            whole = tensors.setdefault(source.at(place), np.zeros((*x.shape[source.num_stacked : -1], source.width), np.float32))
            whole[..., list(source.outputs)] = x[place]
            if source.is_transposed:
                tensors[source.at(place)] = whole.T
    with np.load(GOLDENS / NAME / "gradients.npz") as file:
        assert value == pytest.approx(float(file["loss"]), rel=1e-6)
        wanted = {name: file[name] for name in file.files if name != "loss"}
    assert wanted.keys() == tensors.keys() and len(wanted) == 37
    for name, (largest, *some) in wanted.items():
        flat = tensors[name].reshape(-1)
        found = flat[:: -(-flat.size // 64)]
        np.testing.assert_allclose(found, some, rtol=0, atol=1e-5 * largest, err_msg=name)
        assert np.abs(flat).max() == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("layout", [n if n == "experts" else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_loss_and_gradients_are_those_of_one_device(layout, tiny_file, alone):
    value, gradient = differentiated(setup_of(tiny_file, *LAYOUTS[layout]))
    assert value == pytest.approx(alone[0], rel=2e-6)
    assert gradient.keys() == alone[1].keys()
    for path, wanted in alone[1].items():
        np.testing.assert_allclose(gradient[path], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["experts", "shipped", "ring", "gather", "ulysses"])
def test_logits_are_those_of_transformers_from_any_shards(layout):
    sizes, rules, _ = LAYOUTS[layout]
    config, mesh, (tokens, wanted, std) = config_of(NAME), jgt.make_mesh(sizes), expected(NAME)
    rules = jgt.load_rules(rules) if isinstance(rules, str) else jgt.make_rules(rules)
    model, whole, variables = build(config), np.tile(tokens, (4, 1)), variables_of(NAME, config)

    def run(params, tokens):
        return model.apply(params, variables, tokens)

    shapes = jax.eval_shape(model.init, jax.random.key(0))[0]
    placement = jgt.place(run, rules, mesh, shapes, whole, partial=True)
    logits = jax.jit(jgt.shard(run, rules, mesh, partial=True))(loaded(NAME, config, placement.params), whole)
    assert np.abs(logits[:2, ::5] - wanted).max() < 5e-5 * std


def test_sinks_and_biases_are_no_matrices_of_an_adapter(tiny_file):
    tree = document.read(tiny_file).plain()
    keys = {**published(GOLDENS / NAME).keys, "seq": 96, "base_dtype": "int8"}
    tree |= {"model": keys, "lora": {"rank": 4, "modules": ["layers/**"]}}
    adapters = prepare(load(tree), devices=jax.devices()[:1]).program.adapters
    attention, experts = ("k_proj", "out", "q_proj", "v_proj"), ("down", "gate", "up")
    paths = {f"layers/attn/{name}/kernel" for name in attention} | {f"layers/moe/experts/{name}" for name in experts}
    assert adapters.matrices.keys() == paths | {"layers/moe/router/kernel"}
    assert adapters.packed.keys() <= adapters.matrices.keys() | {"head/unembedding"}
    assert "layers/moe/experts/gate" in adapters.packed


@pytest.mark.slow
def test_adapters_of_experts_add_their_products(tiny_file):
    tree = document.read(tiny_file).plain()
    tree |= {"model": {**published(GOLDENS / NAME).keys, "seq": 96}, "lora": {"rank": 4, "modules": ["experts/*", "{q,v}_proj"]}}
    setup = prepare(load(tree), devices=jax.devices()[:1])
    params, model = setup.last_params(setup.init()), setup.program.model
    moved = jax.tree.map_with_path(lambda path, x: x + 0.1 if jgt.path_text(path).endswith("lora_b") else x, params)
    tokens, variables = expected(NAME)[0], variables_of(NAME, config_of(NAME))
    logits = jax.jit(model.apply)(moved, variables, tokens)
    merged = jax.jit(setup.program.adapters.base.apply)(model.merged(moved), variables, tokens)
    np.testing.assert_allclose(logits, merged, rtol=0, atol=2e-5 * float(jnp.std(merged)))
    assert jnp.abs(logits - jax.jit(model.apply)(params, variables, tokens)).max() > 0.1
