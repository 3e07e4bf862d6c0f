"""The prediction of second next tokens: its loss and gradients are those of a plain decoder, on one device and on meshes."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgt
from train.config import load
from train.run.train import train
from train.setup import prepare
from train.weights.safetensors import open_folder

CONFIGS = Path(__file__).parents[3] / "configs"
DENSE = ("model.mtp_rate=0.3", "model.layers=2")
LATENT = "model.latent={rank: 20, query_rank: 24, rope_dim: 4, value_dim: 12}"
EXPERTS = "model.experts={count: 4, choose: 2, ffn: 16, shared: 1, score: sigmoid, first_dense: 1, z_loss: 0.01}"
MIXTURE = ("model.mtp_rate=0.3", "model.layers=3", "model.heads=4", "model.kv_heads=null", "model.head_dim=12", LATENT, EXPERTS)
LAYOUTS = {
    "fsdp_tensor": ("rules=jgt:fsdp_tensor", "mesh={data: 2, fsdp: 2, tensor: 2}"),
    "experts": ("rules=jgt:experts", "mesh={data: 1, fsdp: 2, expert: 2}"),
    "stages": ("rules=jgt:pipeline", "mesh={data: 1, fsdp: 1, stage: 2, tensor: 2}", "pipeline={signal: layers, microbatches: 4}"),
    "parts": ("mesh={data: 1}", "rules=null", "train.accumulate=4"),
}


def batch_of(rows, seq):
    """A batch whose rows have two documents each, and tokens of several weights."""
    rng = np.random.default_rng(0)
    tokens, weights = rng.integers(0, 256, (rows, seq + 1), np.int32), rng.integers(0, 3, (rows, seq)).astype(np.float32)
    segments = np.where(np.arange(seq) < rng.integers(2, seq - 2, (rows, 1)), 0, seq // 2).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights / weights.sum(), "segments": segments}


def differentiated(run):
    """The parameters, and the loss of a batch with its gradient, in the model's shapes."""
    setup = prepare(run, devices=jax.devices()[: int(np.prod([*run.mesh.values()]))])
    state, batch = setup.init(), batch_of(run.config.train.batch, run.config.model.seq)
    params, frozen = setup.trained.split(state.params)

    def step(params, frozen, variables, batch):
        (loss, part), gradient, _ = setup.gradients.differentiate(setup.objective.beside(frozen), params, variables, batch)
        return setup.storage.left(params), loss, setup.storage.left(gradient), part.metrics

    placed = jax.device_put({name: batch[name] for name in setup.batch_shardings}, setup.batch_shardings)
    return jax.device_get(jax.jit(step)(params, frozen, state.variables, placed)), batch, run.config.model


def normed(scale, x, config):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_eps) * scale["scale"]


def attended(p, x, config, segments):
    q, k, v = ((x @ p[f"{name}_proj"]["kernel"]).reshape(*x.shape[:2], -1, config.head_size) for name in "qkv")
    turn = (jnp.arange(x.shape[1]) - segments)[..., None] * config.rope_theta ** (-jnp.arange(0, config.head_size, 2) / config.head_size)
    cos, sin = jnp.cos(turn)[:, :, None], jnp.sin(turn)[:, :, None]

    def turned(y):
        a, b = jnp.split(y, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    k, v = (jnp.repeat(y, config.heads // config.num_kv_heads, axis=2) for y in (turned(k), v))
    scores = jnp.einsum("bsnh,btnh->bnst", turned(q), k) * config.head_size**-0.5
    seen = jnp.tril(jnp.ones((x.shape[1],) * 2, bool)) & (segments[:, :, None] == segments[:, None, :])
    heads = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), v)
    return heads.reshape(*x.shape[:2], -1) @ p["out"]["kernel"]


def block(p, x, config, segments):
    x = x + attended(p["attn"], normed(p["attn_norm"], x, config), config, segments)
    y = normed(p["mlp_norm"], x, config)
    return x + (jax.nn.silu(y @ p["mlp"]["gate_proj"]["kernel"]) * (y @ p["mlp"]["up_proj"]["kernel"])) @ p["mlp"]["down"]["kernel"]


def plain_loss(params, batch, config):
    """The two losses, document by document of tokens that are told apart by `segments` alone."""
    table, tokens, segments = params["embed"]["embedding"], batch["inputs"], batch["segments"]
    x = table[tokens]
    for n in range(config.layers):
        x = block(jax.tree.map(lambda w, n=n: w[n], params["layers"]), x, config, segments)
    p = jax.tree.map(lambda w: w[0], params["mtp"])
    following = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
    both = [normed(p["token_norm"], table[following], config), normed(p["stream_norm"], x, config)]
    ahead = normed(p["last_norm"], block(p["block"], jnp.concatenate(both, -1) @ p["join"]["kernel"], config, segments), config)

    def nats(x, targets):
        logs = jax.nn.log_softmax(x @ params["head"]["unembedding"].T)
        return -jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]

    first = jnp.sum(batch["weights"] * nats(normed(params["norm"], x, config), batch["targets"]))
    is_same = segments[:, 1:] == segments[:, :-1]
    second = jnp.sum(batch["weights"][:, 1:] * is_same * nats(ahead[:, :-1], batch["targets"][:, 1:]))
    return first + config.mtp_rate * second, second


def far(found, wanted):
    """The largest difference of each array, over the largest number in it."""
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max() / np.abs(y).max(), found, wanted)))


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_a_plain_decoder(tiny):
    (params, loss, gradient, metrics), batch, config = differentiated(tiny(*DENSE, "data.documents=mask"))
    with jax.numpy_rank_promotion("allow"):
        (wanted, second), by_params = jax.jit(jax.value_and_grad(plain_loss, has_aux=True), static_argnums=2)(params, batch, config)
    assert loss == pytest.approx(float(wanted), rel=1e-6)
    value, weight = metrics["mtp_loss"]
    assert value / weight == pytest.approx(float(second), rel=1e-6)
    assert far(gradient, by_params) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_are_the_same_on_meshes(layout, tiny):
    # Terms of the router count by the weights of their part.
    keys = DENSE if layout in ("fsdp_tensor", "parts") else MIXTURE
    _, loss, gradient, metrics = differentiated(tiny(*keys, "mesh={data: 1}", "rules=null"))[0]
    _, other, found, theirs = differentiated(tiny(*keys, *LAYOUTS[layout]))[0]
    assert other == pytest.approx(loss, rel=1e-6)
    for name, (value, weight) in metrics.items():
        assert theirs[name][0] / theirs[name][1] == pytest.approx(value / weight, rel=1e-5)
    assert far(found, gradient) < 1e-5


@pytest.mark.parametrize(("key", "value"), [("train.loss", "dpo"), ("lora", "{rank: 2}"), ("data.order", "zigzag")])
def test_what_leaves_the_second_token_out_is_refused(key, value, tiny):
    with pytest.raises(jgt.InputError, match=f"model.mtp_rate: with {key} no loss of the second next token is computed"):
        tiny(*DENSE, f"{key}={value}")


SMALL = f"""
model.layers=3; model.embed=32; model.heads=4; model.head_dim=12; model.ffn=48; model.vocab=256; model.seq=32; model.dtype=f32; {LATENT}
model.experts.count=8; model.experts.choose=4; model.experts.ffn=16; model.experts.first_dense=1
model.experts.groups={{count: 4, choose: 2}}; mesh={{data: 2, fsdp: 2, expert: 2}}
train.steps=2; train.batch=8; train.eval_every=2; train.eval_batches=1; optimizer.warmup=1
checkpoint.every=2
"""


@pytest.mark.slow
def test_the_shipped_config_trains_at_a_small_size(tmp_path):
    exports = f"checkpoint.export={{every: 2, path: {tmp_path / 'exports'}}}"
    train(load(CONFIGS / "deepseek-v3.yaml", [f"run.dir={tmp_path}", exports, *re.split("[;\\n] *", SMALL.strip())]))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (last,) = [row for row in rows if row.get("step") == 2 and "mtp_loss" in row]
    (evaluated,) = [row for row in rows if "eval_loss" in row]
    assert last["loss"] - 0.3 * last["mtp_loss"] == pytest.approx(evaluated["eval_loss"], abs=0.3)
    names = open_folder(tmp_path / "exports" / "2").tensors
    assert {name.split(".")[2] for name in names if name.startswith("model.layers.")} == {"0", "1", "2"}
    assert not any("mtp" in name or "join" in name for name in names)
    assert json.loads((tmp_path / "exports" / "2" / "config.json").read_text())["model_type"] == "deepseek_v3"
