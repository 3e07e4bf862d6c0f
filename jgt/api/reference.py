"""Judges a compiled program by its operations, which run one by one on one device: what differs by more than rounding is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgt.api.stepwise import Evaluation, Path, equations_at, local, with_noise
from jgt.program import jaxpr as jx
from jgt.program.equations import is_scan
from jgt.program.places import line_of

_SMALLEST = 1e-3
"""An array whose numbers are below this share of the largest array's is compared with that share: it may be zero but for rounding."""
_NUM_NOISY = 3
_ROUNDING = 16.0
"""Rounding may differ by this many times what noise in the last places changes."""

NamedArrays = dict[str, jax.Array]
"""Arrays by their names in messages."""


def errors_of(expected: Mapping[str, jax.Array], found: Mapping[str, jax.Array]) -> dict[str, float]:
    """The largest difference of each array, as a share of its largest number; infinite where one has NaN and the other has none."""
    wide = {name: [_wide(arrays[name]) for arrays in (expected, found)] for name in expected}
    sizes = {name: float(np.max(np.abs(a), initial=0.0, where=np.isfinite(a))) for name, (a, _) in wide.items()}
    smallest = _SMALLEST * max(sizes.values(), default=0.0)
    errors: dict[str, float] = {}
    for name, (a, b) in wide.items():
        finite = np.isfinite(a)
        difference = np.max(np.abs(a[finite] - b[finite]), initial=0.0) / (max(sizes[name], smallest) or 1.0)
        errors[name] = float(difference) if np.array_equal(finite, np.isfinite(b)) else float("inf")
    return errors


def _wide(x: jax.Array) -> np.ndarray:
    array = np.asarray(x)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _is_readable(x: jax.Array) -> bool:
    """Whether JAX can bring an array to the host: not if XLA has split a value inside a program into parts of several sizes."""
    try:
        return bool(np.asarray(x).shape == x.shape)
    except ValueError:
        return False
    except TypeError:
        # Random keys have no numbers to compare.
        return True


def numbers_of(expected: jax.Array, found: jax.Array) -> tuple[float, float]:
    """The numbers at the place where two arrays differ most, which is one where one of them is not finite."""
    a = _wide(expected).ravel()
    b = _wide(found).ravel()
    finite = np.isfinite(a), np.isfinite(b)
    with np.errstate(invalid="ignore"):
        apart = np.where(finite[0] & finite[1], np.abs(a - b), np.where(finite[0] == finite[1], 0.0, np.inf))
    at = np.argmax(apart)
    return float(a[at].real), float(b[at].real)


def judged(
    expected: Mapping[str, jax.Array], found: Mapping[str, jax.Array], noisy: Callable[[int], Mapping[str, jax.Array]], tolerance: float
) -> tuple[dict[str, float], list[str]]:
    """The errors of arrays by name, and the names of those that are wrong: off by more than the tolerance and than rounding explains.

    noisy: `expected` with noise of this number in each last place. It is asked for only if something differs.
    """
    numbers = [name for name, x in expected.items() if not jnp.issubdtype(x.dtype, jax.dtypes.extended)]
    expected, found = ({name: arrays[name] for name in numbers} for arrays in (expected, found))
    errors = errors_of(expected, found)
    if all(error <= tolerance for error in errors.values()):
        return errors, []
    samples = [errors_of(expected, noisy(number)) for number in range(_NUM_NOISY)]
    limits = {name: tolerance + _ROUNDING * max(sample[name] for sample in samples) for name in errors}
    return errors, [name for name, error in errors.items() if not error <= limits[name]]


class Reference:
    """A program on arrays, operation by operation on one device. names: the names of its results."""

    def __init__(self, program: jx.Program, arrays: Sequence[jax.Array], device: Any, names: Sequence[str] = ()):
        self.program, self._arrays, self._device, self._names = program, arrays, device, names

    @functools.cached_property
    def results(self) -> NamedArrays:
        """The results of the program."""
        return self._named(self.run()[0])

    def _named(self, results: Sequence[jax.Array]) -> NamedArrays:
        return dict(zip(self._names, results, strict=True))

    def run(self, seed: int | None = None, keeps: bool = False) -> tuple[list[jax.Array], dict[Path, list[jax.Array]]]:
        """Returns the results, and with `keeps` the values of equations. seed: the seed of the noise, if there is any."""
        noise = None if seed is None else np.random.default_rng(seed)
        with jax.default_device(self._device):
            arrays = [local(x) for x in self._arrays]
            if noise is not None:
                arrays = [with_noise(x, noise) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays]
            evaluation = Evaluation(is_eager=True, keeps=keeps, noise=noise)
            return evaluation.run(self.program, arrays), evaluation.values

    def judge(self, found: NamedArrays, tolerance: float) -> tuple[dict[str, float], list[str]]:
        """Returns `judged` for some of the results, which a compiled program has found."""
        expected = {name: self.results[name] for name in found}
        return judged(expected, found, lambda number: self._named(self.run(number)[0]), tolerance)

    def first_wrong(self, found: Mapping[Path, Sequence[jax.Array]], tolerance: float) -> str:
        """The first equation with a wrong value in the compiled program, or else the first of the backward pass; empty if there is none."""
        expected = self.run(keeps=True)[1]
        found = {path: arrays for path, arrays in found.items() if all(map(_is_readable, arrays))}
        sites = {site.name: site for site in _sites(self.program, expected) if site.path in found}

        def values(number: int) -> NamedArrays:
            return _steps(sites, self.run(number, keeps=True)[1])

        wrong = judged(_steps(sites, expected), _steps(sites, found), values, tolerance)[1]
        if not wrong:
            return ""
        site = min((sites[name] for name in wrong), key=lambda site: site.order)
        errors = errors_of({"": _at(site, expected)}, {"": _at(site, found)})
        return f"{site} is off by {errors['']:.2g}"


@dataclass(frozen=True, kw_only=True)
class _Site:
    """A result of an equation, in one step of the loop around it. order: as a forward pass and then a backward pass meet them."""

    program: jx.Program
    path: Path
    number: int
    step: int | None
    order: tuple[bool, int, int, int]

    @property
    def name(self) -> str:
        return f"{self.path} {self.number} {self.step}"

    def __str__(self) -> str:
        way = list(equations_at(self.program, self.path))
        equation, place = way[-1]
        lines = [line for line in (line_of(around) for around, _ in (way[-1], *way[:-1]) if not is_scan(around)) if line]
        parts = [
            f"the {'cotangent' if place.is_backward else 'value'} of {equation.primitive.name}",
            *(f" at {line}" for line in lines[:1]),
            *(f", called at {line}" for line in lines[1:2] if line != lines[0]),
            f" in signal {place.path}" if place.path else "",
            "" if self.step is None else f", step {self.step} of its loop,",
        ]
        return "".join(parts)


def _sites(program: jx.Program, values: Mapping[Path, Sequence[jax.Array]]) -> Iterator[_Site]:
    first: dict[Path, int] = {}
    for position, (path, results) in enumerate(values.items()):
        way = list(equations_at(program, path))
        loop = next((depth for depth, (equation, _) in enumerate(way) if is_scan(equation) and depth + 1 < len(path)), None)
        begin = position if loop is None else first.setdefault(path[: loop + 1], position)
        for number, result in enumerate(results):
            for step in [None] if loop is None else range(result.shape[0]):
                turn = 0 if step is None or loop is None else -step if way[loop][0].params["reverse"] else step
                order = (way[-1][1].is_backward, begin, turn, position)
                yield _Site(program=program, path=path, number=number, step=step, order=order)


def _steps(sites: Mapping[str, _Site], values: Mapping[Path, Sequence[jax.Array]]) -> NamedArrays:
    return {name: _at(site, values) for name, site in sites.items()}


def _at(site: _Site, values: Mapping[Path, Sequence[jax.Array]]) -> jax.Array:
    whole = values[site.path][site.number]
    return whole if site.step is None else whole[site.step]
