"""The generation of LlamaForCausalLM on one core, as generation.py measures it. Needs torch and transformers.

`python transformers_generate.py` answers each number of rows on stdin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.generation import BARS, PROMPT, SIZES, serve


def main() -> None:
    """Serves."""
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=SIZES["embed"],
        intermediate_size=SIZES["ffn"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        vocab_size=SIZES["vocab"],
        max_position_embeddings=SIZES["seq"],
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    prompts = torch.randint(0, SIZES["vocab"], (max(BARS), PROMPT), generator=torch.Generator().manual_seed(0))
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def generate(rows: int, tokens: int) -> None:
        chosen = prompts[:rows]
        made = model.generate(chosen, attention_mask=torch.ones_like(chosen), max_new_tokens=tokens, min_new_tokens=tokens, **options)
        assert made.shape == (rows, PROMPT + tokens)

    serve(generate)


if __name__ == "__main__":
    main()
