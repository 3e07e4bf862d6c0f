"""Makes tests/goldens/lora/llama.npz: 20 steps of PEFT on the tiny llama of tests/goldens/weights.

It has the factors A that PEFT begins with, the tokens of each step, and the losses.

    pip install -e '.[reference]' peft && python tests/train/weights/make_golden.py
"""

from pathlib import Path

import numpy as np
import peft
import torch
import transformers as hf

GOLDENS = Path(__file__).parents[2] / "goldens"
STEPS, ROWS, SEQ, VOCAB, RANK, ALPHA = 20, 4, 32, 64, 4, 8
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main():
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_pretrained(GOLDENS / "weights" / "llama", dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    factors = {name: p.detach().numpy().copy() for name, p in named.items() if ".lora_A." in name}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (STEPS, ROWS, SEQ + 1))
    losses = []
    for batch in torch.from_numpy(tokens):
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    path = GOLDENS / "lora" / "llama.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, losses=np.array(losses, np.float32), tokens=tokens.astype(np.uint8), **factors)


if __name__ == "__main__":
    main()
