"""Tokens/s of LlamaForCausalLM under torch.compile on one GPU. Needs torch and transformers.

`python huggingface.py SIZES`, with SIZES as `peers.py` passes them, prints JSON. As in jgt, parameters and AdamW's moments are f32, and the
forward pass runs in bf16 (autocast). The batch doubles until memory is full; the fastest batch counts.

This program has not been run yet: see benchmarks/README.md.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import time
from importlib import metadata
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = json.loads(sys.argv[1])
WARMUP = 3


def main() -> None:
    """Prints the fastest batch, and the tokens/s of every batch."""
    torch.set_float32_matmul_precision("high")
    attention = "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"
    tried: dict[int, list[float]] = {}
    for batch in SIZES["batches"]:
        try:
            tried[batch] = steps(batch, attention)
        except torch.cuda.OutOfMemoryError:
            break
        finally:
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    speeds = {batch: batch * SIZES["seq"] * len(s) / sum(s) for batch, s in tried.items()}
    best = max(speeds, key=lambda batch: speeds[batch])
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    found = {"batch": best, "s": tried[best], "tokens_per_s": speeds[best], "all": speeds, "attention": attention}
    print(json.dumps(found | {"parameters": sum(p.numel() for p in make(attention, "meta").parameters()), "versions": versions}))


def make(attention: str, device: str) -> Any:
    """The model, with f32 weights."""
    config = LlamaConfig(
        hidden_size=SIZES["embed"],
        intermediate_size=SIZES["ffn"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        vocab_size=SIZES["vocab"],
        max_position_embeddings=SIZES["seq"],
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation=attention,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def steps(batch: int, attention: str) -> list[float]:
    """Seconds of each step after the warm-up."""
    model = make(attention, "cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    tokens = torch.randint(SIZES["vocab"], (batch, SIZES["seq"]), device="cuda")
    seconds = []
    for _ in range(WARMUP + SIZES["steps"]):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[WARMUP:]


if __name__ == "__main__":
    main()
