"""CPU-seconds of requests to the engine of `jgt serve`, against `jgt generate` of the same prompts.

python benchmarks/serving.py [--json] [--save] [--rounds 9]

The Llama of generation.py, with `generate.batch` of 16, greedy, 64 new tokens. `one` is a single request of 64 tokens; `sixteen` are
requests that come at once; `mixed` are sixteen with 16 to 400 tokens. The engine answers them in its thread as it does for clients, without
HTTP. Engine and generate take turns in one process.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.generation import SIZES
from benchmarks.harness import bar, compared, interleave, make_parser, report
from train import config
from train.commands.serve.engine import Engine, Ticket
from train.generate.generate import Generator
from train.run.api import start_jax_here
from train.setup import prepare

ROWS, TOKENS = 16, 64
LENGTHS = {"one": [64], "sixteen": [64] * ROWS, "mixed": np.random.default_rng(1).integers(16, 400, ROWS).tolist()}
BARS = {"one": 1.1, "sixteen": 1 / 0.9}


def make_generator() -> Generator:
    """The generator of a model with random values."""
    run = config.load({"model": {"kind": "llama", **SIZES}, "mesh": {"data": 1}, "data": {"source": "stdlib"}, "generate": {"batch": ROWS}})
    start_jax_here(run)
    setup = prepare(run)
    return Generator(setup, *setup.program.init(jax.random.key(0)), None)


def programs_of(generator: Generator, engine: Engine, prompts: Sequence[Sequence[int]]) -> dict[str, Callable[[], Any]]:
    """The same answers by both."""

    def by_generate() -> None:
        assert all(len(answer.tokens) == TOKENS for answer in generator.answers(prompts, tokens=TOKENS, temperature=0.0))

    def by_engine() -> None:
        pieces = queue.Queue[Any]()
        requests = generator.requests(prompts, tokens=TOKENS, temperature=0.0)
        engine.submit([Ticket(request=request, deliver=pieces.put) for request in requests])
        ended = 0
        while ended < len(requests):
            ended += bool(pieces.get().reason)

    return {"engine": by_engine, "generate": by_generate}


def main() -> None:
    """Prints the figures for each kind of load, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="how often each program is measured (9)")
    arguments = parser.parse_args()
    generator = make_generator()
    engine = Engine(generator.writer(ROWS), most_waiting=ROWS)
    engine.start()
    rng, found = np.random.default_rng(0), dict[str, Any]()
    for name, lengths in LENGTHS.items():
        prompts = [rng.integers(0, SIZES["vocab"], length).tolist() for length in lengths]
        found[name] = values = compared(interleave(programs_of(generator, engine, prompts), arguments.rounds, warmup=2))
        if name in BARS:
            values["bar"] = bar(values["cpu_s_ratio"]["median"], BARS[name])
    engine.stop()
    engine.join()
    report("serving", found, arguments)


if __name__ == "__main__":
    main()
