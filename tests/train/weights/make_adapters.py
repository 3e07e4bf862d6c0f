"""Makes the folders in tests/goldens/adapters: adapters of PEFT on models of tests/goldens/weights, with the logits that PEFT computes.

    pip install torch transformers peft && python tests/train/weights/make_adapters.py [NAME ...]
    python tests/train/weights/make_adapters.py logits BASE ADAPTER TOKENS.npy OUT.npy

A and B are random: PEFT's initial B is zero. The second form writes the logits of any adapter on any model.
"""

import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers as hf

GOLDENS = Path(__file__).parents[2] / "goldens"
ADAPTERS = {
    "llama": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1},
    # Only the second layer.
    "qwen3": {"r": 3, "lora_alpha": 7, "target_modules": r".*layers\.1\..*(k|o|up|gate)_proj"},
    # Tensors of several modules, and modules with ranks and scales of their own.
    "phi3": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["qkv_proj", "o_proj", "gate_up_proj"],
        "rank_pattern": {"o_proj": 2},
        "alpha_pattern": {"qkv_proj": 5},
        "use_rslora": True,
    },
    # Kernels [in, out], and q, k and v in one.
    "gpt2": {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
    # q, k and v of each head together.
    "gpt_neox": {"r": 2, "lora_alpha": 4, "target_modules": ["query_key_value"]},
}


def base(path):
    return hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def make(name):
    torch.manual_seed(0)
    model = peft.get_peft_model(base(GOLDENS / "weights" / name), peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name]))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_" in path:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / parameter.shape[-1] ** 0.5)
    folder, tokens = GOLDENS / "adapters" / name, torch.randint(3, 64, (2, 32), generator=draw)
    model.peft_config["default"].base_model_name_or_path = name
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    with torch.no_grad():
        logits = model.eval()(tokens).logits.numpy()
    np.savez_compressed(folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=logits)


def logits_of(model, adapter, tokens, out):
    with torch.no_grad():
        np.save(out, peft.PeftModel.from_pretrained(base(model), adapter).eval()(torch.tensor(np.load(tokens))).logits.numpy())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["logits"]:
        logits_of(*sys.argv[2:])
    else:
        for name in sys.argv[1:] or ADAPTERS:
            make(name)
