"""The generation of jgt on one core, as generation.py measures it.

`python jgt_generate.py` answers each number of rows on stdin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.generation import BARS, PROMPT, SIZES, serve
from train import config
from train.generate.generate import Generator
from train.run.api import start_jax_here
from train.setup import prepare


def main() -> None:
    """Serves."""
    run = config.load({"model": {"kind": "llama", **SIZES}, "mesh": {"data": 1}, "data": {"source": "stdlib"}})
    start_jax_here(run)
    setup = prepare(run)
    params, variables = setup.program.init(jax.random.key(0))
    generator = Generator(setup, params, variables, None)
    prompts = np.random.default_rng(0).integers(0, SIZES["vocab"], (max(BARS), PROMPT)).tolist()

    def generate(rows: int, tokens: int) -> None:
        answers = generator.answers(prompts[:rows], tokens=tokens, temperature=0.0, batch=rows)
        assert all(len(answer.tokens) == tokens for answer in answers)

    serve(generate)


if __name__ == "__main__":
    main()
