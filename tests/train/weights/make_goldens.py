"""Makes the folders in tests/goldens/weights: tiny models of all families, with what transformers computes from them: logits, and the
likeliest tokens after prompts of different lengths; of some also the gradient of the loss, of which 64 numbers of each tensor are kept, or
all, as a folder of tests/goldens/gradients.

    pip install -e '.[reference]' && python tests/train/weights/make_goldens.py [NAME ...]

Hugging Face's initial values would hide mistakes, so all weights are random, norms and biases too; windows are 8 tokens and original
lengths 64, where the sequences have 96. Weights are rounded to bf16, in which they are stored; logits are computed from them in f32.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers as hf

OUT = Path(__file__).parents[2] / "goldens" / "weights"
SEQ, VOCAB = 96, 64
PROMPTS, NEW = (5, 30, 17, 1, 9, 22, 12, 3), 64
BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 16}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.3, 2.6],
    "original_max_position_embeddings": 64,
    "factor": 4.0,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0, "beta_fast": 8.0}
GROWING = {
    **YARN,
    "beta_fast": 32.0,
    "original_max_position_embeddings": 16,
    "mscale": 2.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 0.5}
NEOX = {name: BASE[name] for name in BASE if name != "num_key_value_heads"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BIASED = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "num_hidden_layers": 3, "first_k_dense_replace": 1}
GROUPED = {**BIASED, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 0.4}
GLM4_MOE = {**BIASED, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True}
GPT_OSS = {
    "num_local_experts": 4,
    "intermediate_size": 64,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "rope_parameters": {**YARN, "truncate": False, "rope_theta": 150000.0},
}
WITH_GRADIENTS = ("gpt_oss",)
# Gradients of experts that a file has one by one.
AS_FILES = ("deepseek_v3", "qwen3_next")
MSCALE = {**YARN, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    **BIASED,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK = {**MLA, "n_group": 4, "topk_group": 2, "rope_parameters": MSCALE}
DEEPSEEK2 = {
    **DEEPSEEK,
    "norm_topk_prob": False,
    "n_shared_experts": 2,
    "rope_parameters": {**MSCALE, "mscale": 0.707, "mscale_all_dim": 0.4},
}
KIMI = {**MLA, "rope_parameters": {**MSCALE, "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0}, "routed_scaling_factor": 2.827}
INDEXER = {"index_topk": 96, "index_n_heads": 2, "index_head_dim": 8}
SMALL4 = {**GROWING, "factor": 128.0, "mscale": 1.0, "partial_rotary_factor": 1 / 3}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
LINEAR_MOE = {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}
MODELS = {
    "llama": (hf.LlamaConfig, {**BASE, **HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama3": (hf.LlamaConfig, {**BASE, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "llama_yarn": (hf.LlamaConfig, {**BASE, **HEADS, "rope_parameters": {**YARN, "truncate": False}}),
    "mistral": (hf.MistralConfig, {**BASE, **HEADS, "sliding_window": 8}),
    "ministral": (hf.MinistralConfig, {**BASE, **HEADS, **TYPES}),
    "ministral3": (hf.Ministral3Config, {**BASE, **HEADS, "sliding_window": None, "rope_parameters": GROWING}),
    "mixtral": (hf.MixtralConfig, {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": (hf.Qwen2Config, BASE),
    "qwen3": (hf.Qwen3Config, {**BASE, **HEADS}),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        {**BASE, **HEADS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "gemma": (hf.GemmaConfig, {**BASE, **HEADS}),
    "gemma2": (
        hf.Gemma2Config,
        {**BASE, **HEADS, **TYPES, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (hf.Gemma3TextConfig, {**BASE, **HEADS, **TYPES, "query_pre_attn_scalar": 24}),
    "phi3": (hf.Phi3Config, {**BASE, "original_max_position_embeddings": 64, "rope_parameters": LONG, "sliding_window": 80}),
    "olmo2": (hf.Olmo2Config, BASE),
    "olmo3": (hf.Olmo3Config, {**BASE, **TYPES}),
    "smollm3": (hf.SmolLM3Config, {**BASE, "no_rope_layers": [1, 0]}),
    "glm4": (hf.Glm4Config, {**BASE, **HEADS, "attention_bias": True}),
    "glm": (hf.GlmConfig, {**BASE, **HEADS}),
    "seed_oss": (hf.SeedOssConfig, {**BASE, **HEADS, "mlp_bias": True}),
    "exaone4": (hf.Exaone4Config, {**BASE, **TYPES, "sliding_window_pattern": 2}),
    "ernie4_5": (hf.Ernie4_5Config, {**BASE, **HEADS, "use_bias": True}),
    "helium": (hf.HeliumConfig, {**BASE, "head_dim": 8, "mlp_bias": True}),
    "qwen2_moe": (hf.Qwen2MoeConfig, {**BASE, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "olmoe": (hf.OlmoeConfig, {**BASE, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}),
    "glm4_moe": (hf.Glm4MoeConfig, {**BASE, **HEADS, **GLM4_MOE}),
    "dots1": (hf.Dots1Config, {**BASE, **HEADS, **GROUPED, "sliding_window": 8, "max_window_layers": 2}),
    "minimax_m2": (hf.MiniMaxM2Config, {**BASE, **HEADS, **PARTIAL, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": (hf.GptOssConfig, {**BASE, **HEADS, **TYPES, **GPT_OSS}),
    "deepseek_v2": (hf.DeepseekV2Config, {**BASE, **DEEPSEEK2, "topk_method": "group_limited_greedy"}),
    "deepseek_v2_lite": (hf.DeepseekV2Config, {**BASE, **DEEPSEEK2, "q_lora_rank": None, "attention_bias": True}),
    "deepseek_v3": (hf.DeepseekV3Config, {**BASE, **DEEPSEEK}),
    "deepseek_v32": (hf.DeepseekV32Config, {**BASE, **DEEPSEEK, **INDEXER}),
    "glm4_moe_lite": (hf.Glm4MoeLiteConfig, {**BASE, **MLA, "attention_bias": True, "rms_norm_eps": 0.01}),
    "glm_moe_dsa": (hf.GlmMoeDsaConfig, {**BASE, **MLA, **INDEXER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "kimi_k2": (hf.DeepseekV3Config, {**BASE, **KIMI}),
    "mistral4": (hf.Mistral4Config, {**BASE, **MLA, "rope_parameters": SMALL4}),
    "qwen3_next": (hf.Qwen3NextConfig, {**BASE, **LINEAR_MOE, "attention_bias": True}),
    "qwen3_5": (hf.Qwen3_5TextConfig, {**BASE, **LINEAR}),
    "qwen3_5_moe": (hf.Qwen3_5MoeTextConfig, {**BASE, **LINEAR_MOE}),
    "cohere2": (hf.Cohere2Config, {**BASE, **TYPES, "logit_scale": 0.5}),
    "granite": (hf.GraniteConfig, {**BASE, **MULTIPLIERS}),
    "gpt_neox": (hf.GPTNeoXConfig, NEOX),
    "phi": (hf.PhiConfig, {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "cohere": (hf.CohereConfig, {**BASE, "logit_scale": 0.5}),
    "stablelm": (hf.StableLmConfig, {**BASE, "use_qkv_bias": True}),
    "starcoder2": (hf.Starcoder2Config, {**BASE, "sliding_window": 8}),
    "gpt2": (hf.GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": SEQ, "bos_token_id": 1}),
}


def make(name):
    torch.manual_seed(0)
    kind, values = MODELS[name]
    # The one of Mistral 4 is no class of its own for AutoModel, which has it beside images alone.
    made = hf.Mistral4ForCausalLM._from_config if kind is hf.Mistral4Config else hf.AutoModelForCausalLM.from_config
    model = made(kind(**values), attn_implementation="eager").float().eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            value = parameter + 0.2 * noise if parameter.dim() < 2 else noise / parameter.shape[-1] ** 0.5
            parameter.copy_(value.bfloat16().float())
        for path, bias in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                bias.copy_((0.1 * torch.randn(bias.shape, generator=draw)).bfloat16())
        tokens = torch.randint(3, VOCAB, (2, SEQ), generator=draw)
        logits = model(tokens).logits.numpy()
    gradients = gradients_of(model, tokens) if name in WITH_GRADIENTS else {}
    # Prompt n begins at token n of a row.
    prompts = [tokens[n % 2, n : n + length] for n, length in enumerate(PROMPTS)]
    greedy = np.array([continued(model, prompt) for prompt in prompts], np.uint8)
    folder = OUT / name
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == "kimi_k2":
        # Its files say another model_type, with code of their own that is DeepSeek-V3's.
        file = folder / "config.json"
        file.write_text(file.read_text().replace('"model_type": "deepseek_v3"', '"model_type": "kimi_k2"'))
    arrays = {"tokens": tokens.numpy().astype(np.int32), "logits": logits[:, ::5], "std": logits.std(), "greedy": greedy}
    np.savez_compressed(folder / "expected.npz", **arrays)
    if gradients:
        np.savez_compressed(folder / "gradients.npz", **gradients)
    if name in AS_FILES:
        model.float().zero_grad()
        gradients_of(model, tokens)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        model.save_pretrained(OUT.parent / "gradients" / name)
        (OUT.parent / "gradients" / name / "generation_config.json").unlink(missing_ok=True)


def gradients_of(model, tokens):
    """The loss, and of each tensor's gradient the largest number and some."""
    logits = model(tokens).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
    loss.backward()
    found = {"loss": np.float32(loss.item())}
    for name, parameter in model.named_parameters():
        flat = parameter.grad.numpy().reshape(-1)
        found[name] = np.concatenate([[np.abs(flat).max()], flat[:: -(-flat.size // 64)]]).astype(np.float32)
    return found


def continued(model, prompt):
    """The likeliest tokens after a prompt, one after another."""
    options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
    made = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)
    return made[0, len(prompt) :].numpy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        make(name)
