"""Adapters (`lora:`): a model with low-rank updates is the model with the sums, on every mesh, and only they are trained."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgt import document, path_text
from jgt.document import InputError
from train.config import load
from train.setup import prepare
from train.step.trained import merged
from train.weights.described import published
from train.weights.load import open_files

GOLDENS = Path(__file__).parents[2] / "goldens"

LORA = 'lora={rank: 4, alpha: 8, modules: ["{q,k,v}_proj", out, "{gate,up}_proj", down]}'
FSDP = ("rules=jgt:fsdp", "mesh={fsdp: 8}")
THREE = ("rules=jgt:fsdp_tensor", "mesh={data: 2, fsdp: 2, tensor: 2}")
STAGES = (
    "rules=jgt:pipeline",
    "mesh={data: 1, fsdp: 1, stage: 2, tensor: 2}",
    "devices.virtual_cpu=4",
    "pipeline={signal: layers, microbatches: 4, schedule: 1f1b}",
)

MORE = (
    THREE,
    STAGES,
    ("rules=jgt:zero1", "mesh={data: 8}", "train.accumulate=2"),
    ("rules=jgt:overlap", "mesh={data: 2, fsdp: 2, tensor: 2}", "train.remat=block"),
    ("sync={axis: data, every: 1}", "mesh={data: 8}"),
    (*STAGES[:-1], "pipeline={signal: layers, microbatches: 4, schedule: zb}", "train.remat=matmuls"),
)


def batch(rows=16, seq=32):
    tokens = np.random.default_rng(0).integers(0, 256, (rows, seq + 1), np.int32)
    weights = np.full((rows, seq), 1 / (rows * seq), np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def flat(tree):
    return {path_text(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


def prepared(file, *overrides):
    run = load(file, overrides)
    return prepare(run, devices=jax.devices()[: run.config.devices.virtual_cpu or 8])


def moved(params):
    """The parameters with factors B that are not zero: the same on every mesh."""

    def move(path, x):
        values = np.random.default_rng(sum(map(ord, path_text(path)))).normal(size=x.shape) * 0.1
        return jax.device_put(values.astype(np.float32), x.sharding) if path_text(path).endswith("lora_b") else x

    return jax.tree.map_with_path(move, params)


def differentiated(setup):
    """The loss and the gradient of adapters that are not zero, in the model's shapes."""
    state = setup.init()
    params = setup.stored_params(moved(setup.model_params(setup.last_params(state))))
    params, frozen = setup.trained.split(params)

    def run(params, frozen, variables, batch):
        (value, _), gradient, _ = setup.gradients.differentiate(setup.objective.beside(frozen), params, variables, batch)
        return value, gradient

    placed = jax.device_put(batch(), setup.batch_shardings)
    value, gradient = jax.jit(run)(params, frozen, state.variables, placed)
    return float(value), flat(jax.jit(setup.storage.left)(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [FSDP, *MORE])
def test_gradients_are_the_same_on_every_mesh(tiny_file, layout):
    value, gradient = differentiated(prepared(tiny_file, LORA, "mesh={data: 1}", "rules=null"))
    other, sharded = differentiated(prepared(tiny_file, LORA, *layout))
    np.testing.assert_allclose(other, value, rtol=1e-6)
    assert gradient.keys() == sharded.keys() and len(gradient) == 14
    for path, x in gradient.items():
        np.testing.assert_allclose(sharded[path], x, rtol=0, atol=1e-5 * np.max(np.abs(x)), err_msg=path)


BF16 = ("model.dtype=bf16", "model.base_dtype=bf16")


@pytest.mark.parametrize("overrides", [(), *(pytest.param(one, marks=pytest.mark.slow) for one in (BF16[:1], BF16))])
def test_a_run_begins_with_the_losses_of_the_base(tiny_file, overrides):
    base = [key for key in overrides if "base_dtype" not in key]
    plain, adapted = prepared(tiny_file, *base), prepared(tiny_file, LORA, *overrides)
    state = plain.init()
    params = plain.last_params(state)
    if "base_dtype" in str(overrides):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    own = adapted.last_params(adapted.init())
    same = adapted.program.adapters.divided(own)[0]
    jax.tree.map(np.testing.assert_array_equal, same, params)
    placed = jax.device_put(batch(), plain.batch_shardings)
    value = jax.jit(lambda p: plain.objective.loss(p, state.variables, placed)[0])(params)
    np.testing.assert_array_equal(jax.jit(lambda p: adapted.objective.loss(p, state.variables, placed)[0])(own), value)


def test_all_matrices_are_those_of_the_layers(tiny_file):
    # The trainer's loss reads the head in a derivative of its own.
    everything = prepared(tiny_file, 'lora={rank: 4, alpha: 8, modules: ["**"]}')
    assert everything.program.adapters.matrices.keys() == prepared(tiny_file, LORA).program.adapters.matrices.keys()


def test_merged_parameters_have_the_same_logits(tiny_file):
    setup = prepared(tiny_file, LORA)
    params, model = moved(setup.last_params(setup.init())), setup.program.model
    base = setup.program.adapters.base
    tokens = batch()["inputs"]
    adapted, merged = jax.jit(model.apply)(params, {}, tokens), jax.jit(base.apply)(model.merged(params), {}, tokens)
    np.testing.assert_allclose(adapted, merged, atol=2e-5)
    assert np.max(np.abs(adapted - jax.jit(base.apply)(setup.program.adapters.divided(params)[0], {}, tokens))) > 0.1
    np.testing.assert_allclose(model.module(params, {})(tokens), merged, atol=2e-5)


@pytest.mark.slow
def test_only_adapters_are_trained(tiny_file):
    setup = prepared(tiny_file, LORA, "lora.dropout=0.1", "optimizer.train=[norm/scale]", *FSDP)
    state = setup.init()
    first = flat(setup.last_params(state))
    trained = {path for path in first if "lora_" in path or path == "norm/scale"}
    assert {*flat(state.params)} == trained and len(trained) == 15
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(first[path].size for path in trained)
    step = setup.compile_train_step()
    for number in (1, 2):
        state, metrics = step(state, jax.device_put(batch(), setup.batch_shardings), setup.settings(number))
    assert np.isfinite(metrics["loss"]) and int(state.variables["lora"]["count"]) == 2
    for path, x in flat(setup.last_params(state)).items():
        assert np.array_equal(x, first[path]) == (path not in trained), path


@pytest.mark.slow
def test_a_step_needs_fewer_flops(tiny_file):
    def flops(*overrides):
        setup = prepared(tiny_file, "model.embed=256", "model.ffn=768", "mesh={data: 1}", *overrides)
        return setup.train_step().lower(*setup.step_shapes).cost_analysis()["flops"]

    assert flops(LORA) <= 0.72 * flops()


OWN_MODEL = """
import jax, jax.numpy as jnp
from flax import linen, nnx

class Small(nnx.Module):
    def __init__(self, vocab, rngs):
        self.embed = nnx.Embed(vocab, 16, rngs=rngs)
        self.blocks = nnx.List([nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=rngs) for _ in range(2)])
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(32, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.drop(jax.nn.relu(self.hidden(x))))

class Line(linen.Module):
    vocab: int

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(self.vocab, 16)(tokens)
        y = linen.DenseGeneral((2, 8), name="heads")(x).sum(axis=-2)
        x = x + y @ self.param("mix", linen.initializers.lecun_normal(), (8, 16))
        return linen.Dense(self.vocab, name="head")(x)
"""


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        pytest.param(
            "Small",
            {"hidden/lora_a": (16, 4), "blocks/1/query/lora_b": (4, 2, 8), "blocks/0/out/lora_a": (2, 8, 4), "head/lora_b": (4, 256)},
            marks=pytest.mark.slow,
        ),
        ("Line", {"heads/lora_b": (4, 2, 8), "mix_lora_a": (8, 4), "head/lora_b": (4, 256)}),
    ],
)
def test_models_of_your_own(tmp_path, tiny_file, kind, factors):
    (tmp_path / "own_lora.py").write_text(OWN_MODEL)
    tree = document.read(tiny_file).plain()
    tree["model"] = {"kind": f"own_lora:{kind}", "vocab": 256, "seq": 32}
    run = load(tree, ('lora={rank: 4, modules: ["**"]}', "mesh={data: 8}", "rules=null"), code=[tmp_path])
    setup = prepare(run)
    state = setup.init()
    shapes = {path: x.shape for path, x in flat(state.params).items()}
    assert factors.items() <= shapes.items() and not any("embed" in path.lower() for path in shapes)
    step = setup.compile_train_step()
    losses = []
    for number in range(1, 6):
        state, metrics = step(state, jax.device_put(batch(), setup.batch_shardings), setup.settings(number))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


EXPERTS = ("model.experts={count: 4, choose: 2, ffn: 32}", 'lora={rank: 4, modules: ["experts/*", router, "{q,v}_proj"]}')


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("rules=jgt:experts", "mesh={data: 2, fsdp: 1, expert: 4}"), FSDP])
def test_experts_have_an_update_each(tiny_file, layout):
    whole = prepared(tiny_file, *EXPERTS, "mesh={data: 1}", "rules=null")
    params, model, adapters = moved(whole.last_params(whole.init())), whole.program.model, whole.program.adapters
    assert adapters.matrices["layers/moe/experts/gate"].factor_shapes(4) == ((2, 4, 32, 4), (2, 4, 4, 32))
    tokens, variables = batch()["inputs"], whole.init().variables
    merged = jax.jit(adapters.base.apply)(model.merged(params), variables, tokens)
    np.testing.assert_allclose(jax.jit(model.apply)(params, variables, tokens), merged, atol=2e-5)
    value, gradient = differentiated(whole)
    other, sharded = differentiated(prepared(tiny_file, *EXPERTS, *layout))
    np.testing.assert_allclose(other, value, rtol=1e-6)
    for path, x in gradient.items():
        np.testing.assert_allclose(sharded[path], x, rtol=0, atol=2e-5 * np.max(np.abs(x)), err_msg=path)


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        (["lora={modules: []}"], ["lora.modules: [] adapts nothing"]),
        (["lora={modules: [q_porj]}"], ["lora.modules: no module or parameter matches 'q_porj'. Did you mean 'q_proj'? Modules: "]),
        (["lora={modules: [self_attention]}"], ["lora.modules: no module or parameter matches 'self_attention'. Modules: "]),
        (["lora={modules: [embed]}"], ["'embed' matches no matrix that can be adapted: embed/embedding is read by gather"]),
        (["lora={modules: [attn_norm, q_proj]}"], ["'attn_norm' matches no matrix that can be adapted: layers/attn_norm/scale is read by"]),
        (["lora={}", "model.fp8=true"], ["lora: adapts matmuls in f32 or bf16, but model.fp8 is true"]),
        (["lora={rank: 0}"], ["lora.rank: 0 is too small"]),
        (["lora={r: 8}"], ["lora.r: unknown key"]),
    ],
)
def test_problems(tiny_file, overrides, problems):
    with pytest.raises(InputError) as error:
        prepared(tiny_file, *overrides)
    for problem in problems:
        assert any(problem in line for line in error.value.problems), error.value.problems


NAMES = {"o_proj": "attn/out", "down_proj": "mlp/down"}


@pytest.mark.slow
def test_a_run_has_the_losses_of_peft(tiny_file):
    golden = np.load(GOLDENS / "lora" / "llama.npz")
    tokens, seq = golden["tokens"].astype(np.int32), golden["tokens"].shape[2] - 1
    tree = document.read(tiny_file).plain()
    tree |= {
        "model": {"hf": str(GOLDENS / "weights" / "llama"), "seq": seq},
        "lora": {"rank": 4, "alpha": 8, "modules": ["layers/**"]},
        "optimizer": {"lr": 1e-2, "schedule": "constant", "eps": 1e-6, "weight_decay": 0.1, "clip": None},
        "mesh": {"data": 2},
        "devices": {"virtual_cpu": 2},
    }
    tree["train"]["batch"] = tokens.shape[1]
    setup = prepare(load(tree), devices=jax.devices()[:2])
    state, adapters = setup.init(), setup.program.adapters
    shapes, shardings = (adapters.divided(part)[0] for part in setup.saved_params)
    base = open_files(published(GOLDENS / "weights" / "llama"), setup.run.config.model, shapes).load(shapes, shardings)
    params = merged(setup.last_params(state), base)
    for module in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        a = [golden[name].T for name in golden.files if f".{module}.lora_A." in name]
        folder, name = NAMES.get(module, ("mlp/" if module[:2] in ("ga", "up") else "attn/") + module).split("/")
        params["layers"][folder][name]["lora_a"] = np.stack(a)
    state = setup.with_model(state, jax.device_put(params, setup.storage.placement.params), {})
    step, losses = setup.compile_train_step(), []
    for number, rows in enumerate(tokens, 1):
        placed = {"inputs": rows[:, :-1], "targets": rows[:, 1:], "weights": np.ones_like(rows[:, 1:], np.float32)}
        state, metrics = step(state, jax.device_put(placed, setup.batch_shardings), setup.settings(number))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, golden["losses"], atol=1e-4)
