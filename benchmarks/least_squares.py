"""Figures of a cost model that fit measured times.

A model with a figure for each program would repeat the measurements, so the figures are few and each has a prior: a value that is expected,
and how far off it may be. The fit minimises

    sum over programs of rho(log(predicted / measured) / spread) + sum over figures of (log(figure / prior) / width)^2

by Gauss-Newton. rho grows linearly for large errors (soft L1), because some programs differ by more than figures can explain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_STEP = 0.05
_MOST = 20

Figures = Mapping[str, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is expected of a figure. value: its value. width: the error to expect of it, as a logarithm. why: the source of both."""

    value: float
    width: float
    why: str


class Fit:
    """Figures from programs. predict(program, figures): the seconds. measured: the seconds by program. spread: the relative error of each.

    looks: how often errors and their derivatives are taken, each time at the figures that the last look found.
    """

    def __init__(
        self,
        predict: Callable[[str, Figures], float],
        measured: Mapping[str, float],
        priors: Mapping[str, Prior],
        spread: Mapping[str, float],
        looks: int = 2,
    ):
        self._predict, self._measured, self._names, self._figures = predict, measured, list(measured), list(priors)
        self._prior = np.log([prior.value for prior in priors.values()])
        self._width = np.array([prior.width for prior in priors.values()])
        self._spread = np.array([spread[name] for name in self._names])
        # Figures enter the logarithm of a time almost linearly, so the last Jacobian serves the fits of all subsets.
        logs = self._prior
        for _ in range(looks):
            self._look(logs)
            logs = self._solve(self._names)

    def _look(self, logs: Floats) -> None:
        """Takes errors and their Jacobian at these figures."""
        self._at, self._errors = logs, self._errors_at(logs)
        steps = np.eye(len(logs)) * _STEP
        self._jacobian = np.stack([(self._errors_at(logs + step) - self._errors) / _STEP for step in steps], axis=1)

    def of(self, programs: Sequence[str]) -> dict[str, float]:
        """The figures that fit these programs best."""
        return dict(zip(self._figures, np.exp(self._solve(programs)).tolist(), strict=True))

    def _errors_at(self, logs: Floats) -> Floats:
        figures = dict(zip(self._figures, np.exp(logs).tolist(), strict=True))
        return np.array([math.log(self._predict(name, figures) / self._measured[name]) for name in self._names])

    def _solve(self, programs: Sequence[str]) -> Floats:
        chosen = np.array([name in programs for name in self._names])
        jacobian, errors, spread, logs = self._jacobian[chosen], self._errors[chosen], self._spread[chosen], self._at
        for _ in range(_MOST):
            residuals = errors + jacobian @ (logs - self._at)
            # Soft L1 as weights of least squares.
            weights = (1 + (residuals / spread) ** 2) ** -0.25 / spread
            rows = np.concatenate([jacobian * weights[:, None], np.diag(1 / self._width)])
            left = np.concatenate([residuals * weights, (logs - self._prior) / self._width])
            logs = logs - np.linalg.lstsq(rows, left)[0].astype(np.float64)
        return logs
