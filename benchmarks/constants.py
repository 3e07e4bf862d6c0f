"""The free constants of the cost model, and their fit to published runs.

A model with a constant for each row would repeat the table, so the constants are few and each has a prior: a value that is known from
elsewhere, and how far off it may be. The fit minimises

    sum over runs of rho(log(predicted / published) / RUN) + sum over constants of (log(constant / prior) / width)^2

by Gauss-Newton. rho grows linearly for large errors (soft L1), because some runs differ from jgt's program by more than constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jgt.hardware.chip import Chip

RUN = 0.12
"""The relative error that a run is expected to have with the right constants."""
_STEP = 0.05
_MOST = 20

Constants = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Prior:
    """value: of a constant before any run is seen. width: how far off it may be, as a logarithm. why: where it is from."""

    value: float
    width: float
    why: str


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


def chip_with(chip: Chip, constants: Constants) -> Chip:
    """A chip with these constants in place of its own. Ampere has one for its matmuls; Hopper and Blackwell share theirs."""
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


class Fit:
    """Constants from runs. predict(run, constants): seconds; published: by run."""

    def __init__(self, predict: Callable[[str, Constants], float], published: Mapping[str, float]):
        self._predict, self._published, self._names = predict, published, list(published)
        self._prior = np.log([prior.value for prior in PRIORS.values()])
        self._width = np.array([prior.width for prior in PRIORS.values()])
        # The constants enter the logarithm of a step almost linearly, so one Jacobian serves the fits of all subsets.
        self._look(self._prior)
        self._look(self._solve(self._names))

    def _look(self, logs: NDArray[np.float64]) -> None:
        """Measures errors and their Jacobian at these constants."""
        self._at, self._errors = logs, self._errors_at(logs)
        steps = np.eye(len(logs)) * _STEP
        self._jacobian = np.stack([(self._errors_at(logs + step) - self._errors) / _STEP for step in steps], axis=1)

    def of(self, runs: Sequence[str]) -> dict[str, float]:
        """The constants that fit these runs best."""
        return dict(zip(PRIORS, np.exp(self._solve(runs)).tolist(), strict=True))

    def _errors_at(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        constants = dict(zip(PRIORS, np.exp(logs).tolist(), strict=True))
        return np.array([math.log(self._predict(name, constants) / self._published[name]) for name in self._names])

    def _solve(self, runs: Sequence[str]) -> NDArray[np.float64]:
        chosen = np.array([name in runs for name in self._names])
        jacobian, errors, logs = self._jacobian[chosen], self._errors[chosen], self._at
        for _ in range(_MOST):
            residuals = errors + jacobian @ (logs - self._at)
            # Of soft L1, as weights of least squares.
            weights = (1 + (residuals / RUN) ** 2) ** -0.25
            rows = np.concatenate([jacobian * weights[:, None] / RUN, np.diag(1 / self._width)])
            left = np.concatenate([residuals * weights / RUN, (logs - self._prior) / self._width])
            logs = logs - np.linalg.lstsq(rows, left)[0].astype(np.float64)
        return logs
