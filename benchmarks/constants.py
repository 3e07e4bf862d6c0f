"""The free constants of the cost model, and their fit to published runs.

`least_squares.py` fits them, with priors from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.least_squares import Figures, Prior
from jgt.planner.hardware.chip import Chip

RUN = 0.12
"""The relative error that a run is expected to have with the right constants."""

PRIORS: Mapping[str, Prior] = {
    "ampere": Prior(value=0.75, width=0.20, why="large bf16 matmuls of cuBLAS on an A100: 0.8 to 0.9 of the peak, less in a step"),
    "hopper": Prior(value=0.62, width=0.15, why="0.78 to 0.81 in a matmul of 8192^3 on an H200, less at the power limit of a step"),
    "f8": Prior(value=0.58, width=0.15, why="as bf16, less the scaling"),
    "attention": Prior(value=1.0, width=0.25, why="FlashAttention-3 and cuDNN: 0.55 of the peak forward, 0.42 backward, times this"),
    "memory": Prior(value=0.85, width=0.15, why="copies reach 0.90 on an H200"),
    "near": Prior(value=0.80, width=0.25, why="all-gathers of NCCL reach 0.8 of NVLink"),
    "far": Prior(value=0.80, width=0.25, why="all-gathers of NCCL reach 0.8 to 0.9 of InfiniBand"),
}
FORWARD, BACKWARD = 0.55, 0.42


def chip_with(chip: Chip, constants: Figures) -> Chip:
    """A chip with these constants. Ampere has one for its matmuls; Hopper and Blackwell share theirs."""
    matmul = {
        name: replace(rate, share=constants["ampere" if "f8" not in chip.tflops else "hopper"]) for name, rate in chip.rates.matmul.items()
    }
    if "f8" in matmul:
        matmul["f8"] = replace(matmul["f8"], share=constants["f8"])
    scale = constants["attention"]
    rates = replace(
        chip.rates,
        matmul=matmul,
        attention=replace(chip.rates.attention, forward=FORWARD * scale, backward=BACKWARD * scale),
        memory=replace(chip.rates.memory, share=constants["memory"]),
    )
    *_, outermost = chip.links
    links = {name: replace(link, share=constants["far" if name == outermost else "near"]) for name, link in chip.links.items()}
    return replace(chip, rates=rates, links=links)
