"""Forms that plans correct: arrays over all layouts of a search, with regressions whose rows are the layouts that have a plan.

A form is right up to factors. The logarithm of its error is a linear function of a few features of the layout (`Factor`), and a
share between 0 and 1 is such a function itself (`Portion`). Both are ridge regressions (Hoerl and Kennard, Technometrics 12, 1970), so
that a feature of few plans is held back. Memory is a sum of arrays whose sizes are known and whose numbers are not: a regression with
coefficients that are not negative (`Sum`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
_MOST = 3.0
"""A correction is at most a factor of e to this power: an extrapolation of a few plans is not to be believed further."""
_SWEEPS = 100
_LEAST = 0.01
"""The square of the share of a total below which a number says little, and is held at its prior."""


class Factor:
    """A form times a factor. features: [layouts, features]; form: [layouts], in any unit.

    ridge: how firmly the features are held back; constant: how firmly a factor of all layouts is.
    """

    def __init__(self, features: Numbers, form: Numbers, ridge: float = 0.1, constant: float = 1e-4):
        self._features, self._form, self._ridge, self._constant = _with_constant(features), form, ridge, constant
        self._rows: list[tuple[int, float]] = []

    def learn(self, index: int, found: float) -> None:
        """Takes a plan's value into account. Zeros say nothing."""
        if found > 0 and self._form[index] > 0:
            self._rows.append((index, float(np.log(found / self._form[index]))))

    def values(self) -> Numbers:
        """The form of each layout, corrected."""
        if not self._rows:
            return self._form
        rows = self._features[[index for index, _ in self._rows]]
        weights = _ridge(rows, np.array([value for _, value in self._rows]), np.ones(len(rows)), self._ridge, self._constant)
        return self._form * np.exp(np.clip(self._features @ weights, -_MOST, _MOST))


class Portion:
    """A number between 0 and 1, such as the part of a collective that kernels hide: an expected number, and what plans add to it."""

    def __init__(self, features: Numbers, ridge: float = 0.05):
        self._features, self._ridge = _with_constant(features), ridge
        self._rows: list[tuple[int, float, float]] = []

    def learn(self, index: int, share: float, expected: float, weight: float = 1.0) -> None:
        """Takes a plan's share into account. weight: how much it says."""
        self._rows.append((index, min(max(share, 0.0), 1.0) - min(max(expected, 0.0), 1.0), weight))

    def values(self, expected: Numbers | float) -> Numbers:
        """The share of each layout."""
        added: Numbers | float = 0.0
        if self._rows:
            indices, values, weights = map(np.array, zip(*self._rows, strict=True))
            added = self._features @ _ridge(self._features[indices], values, weights, self._ridge, 0.02)
        return np.clip(np.clip(expected, 0, 1) + added, 0, 1)


class Sum:
    """A sum of sizes, each times a number that is not negative. sizes: [layouts] by name; prior: the numbers before the first plan.

    scaled: names whose prior numbers are right up to one factor, which the plans say. A number is held near its prior, the more firmly the
    less of a total it explains there. trust: how firmly at least.
    """

    def __init__(self, sizes: Mapping[str, Numbers], prior: Mapping[str, float], scaled: Collection[str] = (), trust: float = 3.0):
        # Parts of a total, so that each number is 1 before the first plan.
        self._parts = np.column_stack([size * prior.get(name, 1.0) for name, size in sizes.items()])
        self._is_scaled, self._trust = np.array([name in scaled for name in sizes]), trust
        self._rows: list[tuple[int, float]] = []

    def learn(self, index: int, total: float) -> None:
        """Takes a plan's total into account. Zeros say nothing."""
        if total > 0:
            self._rows.append((index, total))

    def values(self) -> Numbers:
        """The sum for each layout."""
        if not self._rows:
            return self._parts.sum(1)
        # Errors are relative: layouts that fit are not outvoted by those that need ten times as much.
        rows = self._parts[[index for index, _ in self._rows]] / np.array([[total] for _, total in self._rows])
        scale = np.where(self._is_scaled, self._scale(rows), 1.0)
        rows = rows * scale
        held = self._trust * np.maximum((rows**2).mean(0), _LEAST)
        numbers = np.ones(len(held))
        # Coordinate descent: each number in turn, with the others as they are.
        for _ in range(_SWEEPS):
            for i in range(len(numbers)):
                rest = 1.0 - rows @ numbers + rows[:, i] * numbers[i]
                numbers[i] = max((rows[:, i] @ rest + held[i]) / (rows[:, i] @ rows[:, i] + held[i]), 0.0)
        return self._parts @ (scale * numbers)

    def _scale(self, rows: Numbers) -> float:
        scaled, fixed = rows[:, self._is_scaled].sum(1), rows[:, ~self._is_scaled].sum(1)
        found = [max(1 - its, 0.1) / mine for mine, its in zip(scaled, fixed, strict=True) if mine > 0]
        return float(np.exp(np.mean(np.log(found)))) if found else 1.0


def _with_constant(features: Numbers) -> Numbers:
    return np.column_stack([np.ones(len(features)), features])


def _ridge(rows: Numbers, values: Numbers, weights: Numbers, ridge: float, constant: float) -> Numbers:
    """The coefficients of a weighted ridge regression, whose first column is held back by `constant` instead."""
    held = ridge * np.eye(rows.shape[1])
    held[0, 0] = constant
    weighted = rows.T * weights
    return np.asarray(np.linalg.solve(weighted @ rows + held, weighted @ values), np.float64)
