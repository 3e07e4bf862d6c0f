# pyright: basic
"""The judge: what a program computes on a mesh against the same program evaluated operation by operation on one device.

A program that is compiled for one device cannot be the reference, because XLA computes some of those wrongly (openxla/xla#49176). A
difference counts only if rounding cannot explain it. If all values are short whole numbers, there is no rounding. Otherwise the program is
evaluated again with arguments that differ in their last bits, and its results may differ by as much as that changes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgt.conformance.program import AXES, HELPERS, INEXACT, DrawnProgram

Constrain = Callable[[str, jax.Array], jax.Array]
"""Lays out the value of a name."""
_Evaluate = Callable[[DrawnProgram, Mapping[str, jax.Array], Constrain], dict[str, jax.Array]]
"""See `values_of`."""
_SLACK = {"float32": 1e-3, "bfloat16": 3e-2}
"""The share of the largest number by which an array may differ, whatever it is computed from."""
_NOISE = {"float32": 2e-6, "bfloat16": 2.0**-7}
_TRUST = {"float32": 30.0, "bfloat16": 6.0}
"""An array may differ by so many times its change under noise."""
_NOISES = 8
"""Draws of noise. Two numbers that rounding makes equal, or not, are in another order in half of them."""
_EXACT = {"float32": 2.0**15, "bfloat16": 2.0**4}
"""Sums and products of eighths up to here are exact."""


def _names() -> dict[str, object]:
    names: dict[str, object] = {
        "jax": jax,
        "jnp": jnp,
        "lax": lax,
        "np": np,
        "r": lambda seed, *shape: np.random.RandomState(seed).randn(*shape),
    }
    for text in HELPERS.values():
        exec(text, names)
    return names


NAMES = _names()
"""The functions that the steps and the arguments of a program call."""


@functools.lru_cache(maxsize=10_000)
def _compiled(code: str) -> CodeType:
    return compile(code, code, "eval")


def as_is(name: str, value: jax.Array) -> jax.Array:
    """Lays out nothing."""
    return value


def on_mesh(program: DrawnProgram) -> Constrain:
    """Constrains values to the program's specs."""
    devices = np.array(jax.devices()[: program.num_devices]).reshape(program.mesh)
    mesh = Mesh(devices, tuple(AXES[: len(program.mesh)]))

    def place(name: str, value: jax.Array) -> jax.Array:
        spec = program.specs.get(name)
        if spec is None:
            return value
        return lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec))))

    return place


def values_of(program: DrawnProgram, arguments: Mapping[str, jax.Array], place: Constrain) -> dict[str, jax.Array]:
    """Every value of the program."""
    values = {value.name: place(value.name, arguments[value.name]) for value in program.inputs}
    for step in program.steps:
        values[step.name] = place(step.name, eval(_compiled(step.code), NAMES | values))
    return values


def outcome_of(
    program: DrawnProgram, arguments: Mapping[str, jax.Array], place: Constrain, evaluate: _Evaluate = values_of
) -> dict[str, jax.Array]:
    """The outputs, and the gradients by the arguments that have one: `value v1`, `gradient x0`."""

    def outputs(moved: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        values = evaluate(program, {**arguments, **moved}, place)
        return {name: values[name] for name in program.outputs}

    if not program.gradient:
        return {f"value {name}": value for name, value in outputs({}).items()}
    values, pull = jax.vjp(outputs, {name: arguments[name] for name in program.moved})
    (gradients,) = pull({name: arguments[f"c_{name}"] for name in program.outputs})
    return {f"value {name}": v for name, v in values.items()} | {f"gradient {name}": v for name, v in gradients.items()}


def shaped(program: DrawnProgram) -> DrawnProgram:
    """The program with the shapes and types of its steps, and without specs that do not fit. Raises what JAX raises if it is not legal."""
    arguments = {value.name: jax.ShapeDtypeStruct(value.shape, jnp.dtype(value.dtype)) for value in program.inputs}
    shapes = jax.eval_shape(lambda a: values_of(program, a, as_is), arguments)
    steps = tuple(replace(step, shape=shapes[step.name].shape, dtype=str(shapes[step.name].dtype)) for step in program.steps)
    if any(step.dtype not in ("float32", "bfloat16", "int32", "bool") for step in steps):
        raise ValueError("a step has a type that no argument has")
    specs = {name: spec for name, spec in program.specs.items() if name in shapes and len(spec) == len(shapes[name].shape)}
    return replace(program, steps=steps, specs=specs)


@dataclass(frozen=True, kw_only=True)
class WrongArray:
    """A wrong array. error: as a share of its largest number; infinite where arguments have NaN or infinities. draw: its number."""

    what: str
    error: float
    draw: int


class Judge:
    """Knows the right results of a program for one draw of its arguments, and compares others with them."""

    def __init__(self, program: DrawnProgram, draw: int):
        self._program, self._draw = program, draw
        self._type = "bfloat16" if any(value.dtype == "bfloat16" for value in program.values.values()) else "float32"

    @functools.cached_property
    def arguments(self) -> dict[str, jax.Array]:
        """The arguments by name."""
        program = self._program
        return {value.name: eval(_compiled(program.numbers(value, self._draw)), NAMES) for value in program.arguments}

    @functools.cached_property
    def expected(self) -> dict[str, np.ndarray]:
        """The results, computed operation by operation."""
        return self._evaluated(self.arguments)

    def differences(self, found: Mapping[str, jax.Array]) -> list[WrongArray]:
        """The arrays that differ by more than rounding explains."""
        suspects = {what: np.asarray(value).astype("f8") for what, value in found.items()}
        suspects = {what: got for what, got in suspects.items() if self._error(what, got, np.zeros(got.shape)) > 0}
        errors = {what: self._error(what, got, self._doubts[what]) for what, got in suspects.items()}
        return [WrongArray(what=what, error=error, draw=self._draw) for what, error in errors.items() if error > 0]

    @functools.cached_property
    def _has_special(self) -> bool:
        return not all(np.isfinite(np.asarray(value).astype("f8")).all() for value in self.arguments.values())

    def _evaluated(self, arguments: Mapping[str, jax.Array], place: Constrain = as_is) -> dict[str, np.ndarray]:
        with jax.disable_jit():
            results = outcome_of(self._program, {name: place(name, value) for name, value in arguments.items()}, place)
        return {what: np.asarray(value).astype("f8") for what, value in results.items()}

    @functools.cached_property
    def _doubts(self) -> dict[str, np.ndarray]:
        """The change of each number of each result that rounding explains: not a number where it may be anything."""
        doubts = {what: np.zeros_like(value) for what, value in self.expected.items()}
        for seed in () if self._is_exact() else range(_NOISES):
            rng = np.random.RandomState(seed)
            noisy = {name: self._with_noise(rng, value) for name, value in self.arguments.items()}
            for what, value in self._evaluated(noisy).items():
                with np.errstate(invalid="ignore"):
                    doubts[what] = np.maximum(doubts[what], np.where(self._is_same(what, value), 0, abs(value - self.expected[what])))
        # A sum of parts may have another sign of zero, which a sort sees.
        for sign in (1, -1):
            for what, value in self._evaluated(self.arguments, functools.partial(_with_zeros, sign)).items():
                doubts[what] = np.where(self._is_same(what, value), doubts[what], np.nan)
        if not self._is_finite:
            one, other = (self._evaluated(self.arguments, _Finite(seed)) for seed in range(2))
            for what, expected in self.expected.items():
                # XLA may compute a 0 * NaN, or a 0 * infinity, that no number in its place would change, as 0.
                doubts[what] = np.where((one[what] == other[what]) & (one[what] != expected), np.nan, doubts[what])
        return doubts

    def _is_same(self, what: str, value: np.ndarray) -> np.ndarray:
        return (value == self.expected[what]) | (np.isnan(value) & np.isnan(self.expected[what]))

    @property
    def _is_finite(self) -> bool:
        return not self._has_special and all(np.isfinite(value).all() for value in self.expected.values())

    def _with_noise(self, rng: np.random.RandomState, value: jax.Array) -> jax.Array:
        if str(value.dtype) not in INEXACT:
            return value
        signs = rng.choice((-1.0, 1.0), size=value.shape)
        return (value * (1 + _NOISE[self._type] * signs)).astype(value.dtype)

    def _is_exact(self) -> bool:
        """Whether no rounding takes place, because each value is a short number."""
        with jax.disable_jit():
            values = values_of(self._program, self.arguments, as_is)
        everything = [*(np.asarray(value).astype("f8") for value in values.values()), *self.expected.values()]
        finite = np.concatenate([value[np.isfinite(value)].ravel() for value in everything])
        return bool(np.all(finite * 8 == np.round(finite * 8)) and np.all(abs(finite) <= _EXACT[self._type]))

    def _error(self, what: str, got: np.ndarray, doubt: np.ndarray) -> float:
        """The largest difference as a share of the largest number, or 0 if the array may be right."""
        want, known = self.expected[what], np.isfinite(doubt)
        finite = np.isfinite(want) & np.isfinite(got)
        # A padded sum spreads the NaN of an argument, because 0 * NaN is NaN. Only a loss of it is a fault.
        spread = ~np.isfinite(got) & (self._has_special | ~np.isfinite(want)) & ~(np.isinf(got) & np.isinf(want))
        if not np.all(finite | spread | (want == got) | ~known):
            return np.inf
        scale = max(float(abs(want[finite]).max(initial=0)), 1e-3)
        allowed = _SLACK[self._type] * scale + _TRUST[self._type] * float(doubt[known].max(initial=0))
        sure = finite & known
        difference = float(abs(got[sure] - want[sure]).max(initial=0))
        if difference <= allowed:
            return 0.0
        return np.inf if self._has_special else difference / scale


def _with_zeros(sign: int, name: str, value: jax.Array) -> jax.Array:
    """A value whose zeros have one sign."""
    return (sign * value + 0) * sign if str(value.dtype) in INEXACT else value


class _Finite:
    """Puts large numbers in the place of NaN and infinities."""

    def __init__(self, seed: int):
        self._rng = np.random.RandomState(seed)

    def __call__(self, name: str, value: jax.Array) -> jax.Array:
        if str(value.dtype) not in INEXACT:
            return value
        numbers = self._rng.uniform(500, 1e3, size=value.shape)
        signs = jnp.where(jnp.isinf(value), jnp.sign(value), self._rng.choice((-1.0, 1.0), size=value.shape))
        return jnp.where(jnp.isfinite(value), value, (numbers * signs).astype(value.dtype))
