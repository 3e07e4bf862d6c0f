"""Batches of requests: the tokens of transformers (tests/goldens/weights), for texts of different lengths, on any mesh."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_models import GOLDENS, NAMES, config_of, loaded, variables_of

import jgt
from train.generate.batch import TextBatch, TextRequest
from train.generate.caching import caching_of
from train.generate.programs import TextPrograms
from train.generate.rules import _dims_of, generation_rules
from train.models.config import ModelConfig, OwnModel
from train.models.decoder import build
from train.models.model import of_nnx
from train.settings.sampling import Sampling

PROMPTS = (5, 30, 17, 1, 9, 22, 12, 3)
REPLICATED = {"axes": {"batch": ["data"]}, "default": "replicate"}
POSITIONS = {
    "axes": {"batch": ["data"]},
    "signals": {"layers/attn": {"tensors": {"{k,v}_cache": ["batch", "tensor", None, None]}}},
    "default": "replicate",
}
HEADS = {
    "axes": {"batch": ["fsdp", "expert"]},
    "signals": {
        "layers/attn": {"tensors": {"{q,k,v,heads}": ["batch", None, "tensor", None]}},
        "layers/moe": {"params": {"experts/*": ["expert", None, None]}, "experts": {"axis": "expert"}},
    },
    "default": "replicate",
}
MESHES = {
    "none": ({"data": 1}, None),
    "data": ({"data": 8}, "replicated"),
    "fsdp": ({"fsdp": 8}, "fsdp"),
    "2x2x2": ({"data": 2, "fsdp": 2, "tensor": 2}, "fsdp_tensor"),
    "tensor": ({"data": 2, "tensor": 4}, "tensor"),
    "sequence": ({"data": 4, "tensor": 2}, "sequence"),
    "expert": ({"data": 2, "fsdp": 1, "expert": 4}, "experts"),
    "positions": ({"data": 2, "tensor": 4}, POSITIONS),
    "heads": ({"fsdp": 2, "tensor": 2, "expert": 2}, HEADS),
}
"""Meshes with their rules. `tensor` has as many devices as gpt2 has key/value heads, and more than the other models have."""
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1)


def programs(model, config, mesh, rules, **options):
    rules = jgt.load_rules(f"jgt:{rules}") if isinstance(rules, str) else jgt.make_rules(rules or REPLICATED)
    batch = rules.match_input("batch/inputs", 2).rule.dims(2)[0]
    made = jgt.make_mesh(mesh, devices=jax.devices()[: math.prod(mesh.values())])
    kv_heads = (config.kept_sizes[0], config.num_kv_heads) if isinstance(config, ModelConfig) else None
    return TextPrograms(
        model=model,
        caching=caching_of(config, has_cache=model.has_cache),
        rules=generation_rules(rules, batch, made.shape, kv_heads, **options),
        mesh=made,
        batch=batch,
        vocab=config.vocab,
        known=config.vocab,
    )


def prompts_of(name):
    with np.load(GOLDENS / name / "expected.npz") as file:
        tokens = file["tokens"]
        return [tokens[n % 2, n : n + length].tolist() for n, length in enumerate(PROMPTS)], file["greedy"].tolist()


def continued(batch, prompts, limit, sampling=GREEDY):
    """The tokens after each prompt. A row that is free gets the next prompt."""
    waiting = [TextRequest(tokens=prompt, limit=limit, sampling=sampling, seed=5, number=n) for n, prompt in enumerate(prompts)]
    found = [[] for _ in prompts]
    while waiting or batch.is_busy:
        admitted = [waiting.pop(0) for _ in range(min(len(waiting), batch.num_free))]
        for token in [*batch.admit(admitted), *batch.step()]:
            found[token.request.number].append(token.token)
    return found


@cache
def model_of(name, layout="none"):
    """The compiled programs and the arrays of a golden model, for all tests."""
    config = config_of(name, seq=96)
    model = build(config)
    made = programs(model, config, *MESHES[layout])
    return made, made.placed(jax.device_get(loaded(name, config)), variables_of(name, config))


def batch_of(name, layout="none", *, rows):
    made, arrays = model_of(name, layout)
    return TextBatch(made, *arrays, rows=rows)


WRITTEN = [name for name in NAMES if "greedy" in np.load(GOLDENS / name / "expected.npz")]

EXPERTS = ("dots1", "glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
LATENT = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "mistral4")
DENSE = ("gemma2", "gemma3", "gpt2", "granite", "llama3", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
ON_ALL = (*DENSE, "dots1", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v2_lite")


def on_meshes():
    """These families on every mesh that they have rules for, and each of the others on one."""
    for n, name in enumerate(WRITTEN):
        is_mixed = name in EXPERTS + LATENT
        fitting = ["none", "data", "expert"] if is_mixed else [mesh for mesh in MESHES if mesh not in ("expert", "heads")]
        # Rules for layers without experts are in use for their first one, and split the heads of all.
        fitting += ["2x2x2", "tensor", "positions"] if name in LATENT else ["heads"] if is_mixed else []
        yield from ((name, mesh) for mesh in (fitting if name in ON_ALL else [fitting[n % len(fitting)]]))


# Windows and full layers, queries that grow, first layers without experts, sinks, and latents, in a batch whose rows get further prompts.
@pytest.mark.parametrize("name", ["gemma3", "ministral3", "dots1", "gpt_oss", "deepseek_v3", "mistral4"])
def test_tokens_are_those_of_transformers(name):
    prompts, expected = prompts_of(name)
    chosen = [0, 4, 6]
    found = continued(batch_of(name, rows=2), [prompts[n] for n in chosen], 20)
    assert found == [expected[n][:20] for n in chosen]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), list(on_meshes()))
@pytest.mark.parametrize("rows", [1, 8])
def test_tokens_are_those_of_transformers_on_any_mesh(name, layout, rows):
    prompts, expected = prompts_of(name)
    count = 3 if rows == 1 else 8
    assert continued(batch_of(name, layout, rows=rows), prompts[:count], 64) == expected[:count]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2x2x2", "tensor"])
def test_draws_are_the_same_on_any_mesh(layout):
    prompts, _ = prompts_of("llama3")
    wanted = continued(batch_of("llama3", rows=8), prompts, 40, WARM)
    assert continued(batch_of("llama3", layout, rows=4), prompts, 40, WARM) == wanted
    assert wanted != prompts_of("llama3")[1]


@pytest.mark.slow
def test_a_step_gathers_no_weights():
    batch, (made, (params, variables)) = batch_of("llama3", "fsdp", rows=8), model_of("llama3", "fsdp")
    batch.admit([TextRequest(tokens=[1], limit=2, sampling=GREEDY)] * 8)
    text = made.write.lower(params, variables, batch._state, batch._settings).compile().as_text()
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))
    # What a step gathers are the tokens that it has drawn.
    assert not [line for line in text.splitlines() if " all-gather(" in line and "f32[8]" not in line and "s32[8]" not in line]


def test_latents_are_one_head_and_their_keys_are_split_by_heads():
    rules, batch = jgt.load_rules("jgt:fsdp_tensor"), ("data", "fsdp")
    for _ in range(2):
        # A plan makes the rules of generation of such rules again.
        rules = generation_rules(rules, batch, {"data": 2, "fsdp": 2, "tensor": 2}, (1, 8))
        for name, axes in (("k", ("tensor",)), ("v", ("tensor",)), ("k_cache", ()), ("v_cache", ())):
            assert _dims_of(rules, name) == (batch, (), axes, ())


def test_a_cache_has_the_bytes_of_its_formula():
    config = ModelConfig(layers=6, embed=32, heads=4, kv_heads=2, vocab=64, seq=4096, window=100, full_layers=(5,), dtype="bf16")
    made = programs(build(config), config, *MESHES["none"])
    params, variables = jax.eval_shape(made.model.init, jax.random.key(0))
    shapes = made._cache_shapes(params, variables, 3, 1024)
    of_token = 2 * 2 * 8 * 2
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) == 3 * of_token * (1024 + 5 * 100) + 4


def test_request_ends():
    prompts, expected = prompts_of("gemma3")
    batch = batch_of("gemma3", rows=2)
    end = expected[0][6]
    first = expected[0].index(end)
    requests = [
        TextRequest(tokens=prompts[0], limit=50, sampling=GREEDY, ends=frozenset([end])),
        TextRequest(tokens=prompts[4], limit=9, sampling=GREEDY),
    ]
    made = batch.admit(requests)
    while batch.is_busy:
        made += batch.step()
    reasons = {token.request: token.reason for token in made}
    assert [reasons[request] for request in requests] == ["stop", "length"]
    counts = [sum(token.request is request for token in made) for request in requests]
    assert counts == [first + 1, 9]
    request = TextRequest(tokens=prompts[6], limit=9, sampling=GREEDY)
    batch.admit([request])
    batch.release(request)
    assert batch.num_free == 2


def test_a_step_computes_the_rows_in_use():
    prompts, expected = prompts_of("llama3")
    batch, limits = batch_of("llama3", rows=7), (12, 2, 2, 2, 2)
    requests = [TextRequest(tokens=prompts[n], limit=limit, sampling=GREEDY) for n, limit in enumerate(limits)]
    made, sizes = batch.admit(requests[:1]), []
    while batch.is_busy:
        # One row alone, then five of them in seven, and the first one alone again, which has moved twice.
        made += [*(batch.admit(requests[1:]) if len(sizes) == 2 else []), *batch.step()]
        sizes.append(batch._settings.seed.size)
    assert sizes == [1, 1, 7, *[1] * 8]
    for request, tokens in zip(requests, expected, strict=False):
        assert [token.token for token in made if token.request is request] == tokens[: request.limit]


def test_requests_of_one_length_join_together():
    batch = batch_of("llama3", rows=4)
    short, long = [[TextRequest(tokens=[1] * size, limit=2, sampling=GREEDY) for _ in range(4)] for size in (10, 40)]
    assert batch.joining([]) == []
    assert batch.joining([short[0], long[0], short[1], long[1], short[2]]) == short[:2]
    batch.admit(long[:2])
    assert batch.joining([long[2], *short]) == long[2:3]


def test_texts_are_padded_by_less_than_a_quarter():
    caching = caching_of(ModelConfig(layers=1, embed=8, heads=1, vocab=8, seq=1000), has_cache=False)
    assert [caching.padded(n) for n in (1, 16, 17, 100, 129, 448, 449, 900, 1000)] == [16, 16, 32, 112, 160, 448, 512, 1000, 1000]
    assert all(n <= caching.padded(n) < 1.25 * n + 16 for n in range(1, 1001))
    assert len({caching.padded(n) for n in range(1, 1001)}) == 20


# -- models of the user's own --------------------------------------------------------------------------------------


class Averaged(nnx.Module):
    """Scores of the mean of the tokens so far."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(32, 16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, tokens):
        counts = jnp.arange(1, tokens.shape[1] + 1)[None, :, None]
        return self.head(jnp.cumsum(self.embed(tokens), axis=1) / counts)


class Recurrent(Averaged):
    def init_cache(self, rows, length):
        return {"sum": jnp.zeros((rows, 16))}

    def decode(self, tokens, positions, cache):
        total = cache["sum"] + self.embed(tokens)
        return self.head(total / (positions[:, None] + 1)), {"sum": total}


@pytest.mark.parametrize("layout", ["none", pytest.param("data", marks=pytest.mark.slow)])
def test_a_model_of_ones_own_is_called_with_whole_texts_or_has_a_cache(layout):
    config, prompts = OwnModel(kind="m:M", vocab=32, seq=24), [[3, 4, 5], [7] * 9, [1]]
    found = {}
    for kind in (Averaged, Recurrent):
        model = of_nnx(lambda rngs, kind=kind: kind(rngs))
        made = programs(model, config, *MESHES[layout])
        params, variables = model.init(jax.random.key(0))
        found[kind] = continued(TextBatch(made, *made.placed(jax.device_get(params), variables), rows=2), prompts, 30)
        texts, apply = [list(prompt) for prompt in prompts], jax.jit(model.apply)
        for text in texts:
            while len(text) < 24:
                padded = np.array([text + [0] * (24 - len(text))])
                text.append(int(np.argmax(apply(params, variables, padded)[0, len(text) - 1])))
        assert found[kind] == [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
