"""A drawn program as data: arguments, steps in JAX's source text, outputs, and the specs of its values on a mesh.

Everything that a run needs is in the program, the data included: an argument's numbers are an expression, which the judge evaluates and the
listing of the program prints. So a listing computes exactly what was found to be wrong.
"""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

AXES = "abcd"
"""The names of mesh axes."""
DRAWS = (0, 1, 2)
"""The numbers of the draws of a program's arguments: whole numbers, with ties; normal ones; and special ones."""
HELPERS = {
    "square": "square = jax.custom_jvp(lambda v: v * v); square.defjvp(lambda p, t: (p[0] * p[0], 2 * p[0] * t[0]))",
    "through": "through = jax.custom_vjp(lambda v: jnp.round(v)); through.defvjp(lambda v: (through(v), v), lambda v, g: (g * (v < 2),))",
}
"""Functions with derivatives of their own, which steps may call, by name."""
INEXACT = ("float32", "bfloat16")
DimAxes = tuple[tuple[str, ...], ...]
"""The mesh axes that split each dim of a value."""
NAME = re.compile(r"\b[xkv]\d+\b")
"""The name of a value."""
_FUNCTION = re.compile(r"\b(?:jnp|lax|jax)\.([\w.]+)|(\.at)\b|\.(\w+)(?=\()|'([^']*->[^']*)'| (@) |\b(\w+)=(?!=)")


@dataclass(frozen=True, kw_only=True)
class DrawnValue:
    """An array of a program."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class DrawnArgument(DrawnValue):
    """An argument. seed: its number among those of a program, for its draws. bound: it is an index into a dim of this size.

    Indices are drawn at the boundaries of the dim and beyond.
    """

    seed: int
    bound: int | None = None
    is_cotangent: bool = False


@dataclass(frozen=True, kw_only=True)
class Step(DrawnValue):
    """An operation. code: an expression of earlier values. kind: the production's. operand: the value that it is about. dim: one of its."""

    kind: str
    code: str
    operand: str
    dim: int

    @property
    def reads(self) -> set[str]:
        """The names of the values that the expression has."""
        return set(NAME.findall(self.code))

    @property
    def form(self) -> str:
        """The functions and keywords of the expression, without its numbers and names: `at set mode`, `einsum bij,bkj->bik`."""
        return " ".join("".join(found).removeprefix(".") for found in _FUNCTION.findall(self.code)) or self.kind.replace("single", "index")


@dataclass(frozen=True, kw_only=True)
class DrawnProgram:
    """Arguments, steps and outputs, and how they are laid out. gradient: whether it has the cotangents of its outputs pulled back.

    mesh: the sizes of the axes. specs: by the name of a value; others are left to XLA. salt: what the arguments are drawn with.
    """

    inputs: tuple[DrawnArgument, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    gradient: bool
    salt: int
    mesh: tuple[int, ...] = ()
    specs: Mapping[str, DimAxes]

    @property
    def values(self) -> dict[str, DrawnValue]:
        """The arguments and the steps, by name."""
        return {value.name: value for value in (*self.inputs, *self.steps)}

    @property
    def moved(self) -> tuple[str, ...]:
        """The arguments that have a gradient."""
        return tuple(value.name for value in self.inputs if value.dtype in INEXACT)

    @property
    def arguments(self) -> tuple[DrawnArgument, ...]:
        """The inputs and, for a gradient, the cotangents of the outputs."""
        values = self.values
        cotangents = (
            DrawnArgument(name=f"c_{name}", shape=values[name].shape, dtype=values[name].dtype, seed=100 + number, is_cotangent=True)
            for number, name in enumerate(self.outputs if self.gradient else ())
        )
        return (*self.inputs, *cotangents)

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of the steps."""
        return tuple(step.form for step in self.steps)

    def pruned(self) -> DrawnProgram:
        """The program without arguments, steps and specs that its outputs do not need."""
        needed, steps = set(self.outputs), list[Step]()
        for step in reversed(self.steps):
            if step.name in needed:
                steps.insert(0, step)
                needed |= step.reads
        inputs = tuple(value for value in self.inputs if value.name in needed)
        specs = {name: spec for name, spec in self.specs.items() if name in needed}
        return replace(self, inputs=inputs, steps=tuple(steps), specs=specs)

    @property
    def num_devices(self) -> int:
        """The devices of the mesh."""
        return math.prod(self.mesh)

    def numbers(self, argument: DrawnArgument, draw: int) -> str:
        """The expression of an argument's numbers. `r(seed, *shape)` draws normal numbers."""
        key = f"{argument.seed} {draw} {self.salt}"
        rng = random.Random(key)
        shape = "".join(f", {size}" for size in argument.shape)
        seed = zlib.crc32(key.encode()) % 1000
        normal = f"r({seed}{shape})"
        if argument.bound is not None:
            return f"jnp.int32({_indices(rng, argument, normal)})"
        if argument.dtype == "bool":
            return f"jnp.bool_({normal} > {(0, 1, rng.choice((9, -9)))[draw]})"
        whole = f"np.round({normal} * 2)"
        # A NaN as an integer is any number.
        special = ("whole", "normal") if any("int32" in step.code for step in self.steps) else ("nan", "inf", "whole", "normal")
        kind = ("whole", "normal", random.Random(self.salt).choice(special))[draw]
        if argument.dtype == "int32" or kind == "whole" or argument.is_cotangent:
            text = whole
        elif kind == "normal":
            text = normal
        else:
            rare = "np.nan" if kind == "nan" else f"np.inf * np.sign({normal})"
            text = f"np.where(abs({normal}) > 1.8, {rare}, {whole})"
        return f"jnp.{argument.dtype}({text})"

    def layout(self) -> str:
        """The specs, with axes renamed in the order of their appearance: `x0 [(a, b), c], v0 [c, null]`."""
        names: dict[str, str] = {}

        def dim(axes: tuple[str, ...]) -> str:
            new = [names.get(axis) or names.setdefault(axis, AXES[len(names)]) for axis in axes]
            return "null" if not new else new[0] if len(new) == 1 else f"({', '.join(new)})"

        return ", ".join(f"{name} [{', '.join(map(dim, self.specs[name]))}]" for name in self.values if name in self.specs)

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def of_json(cls, read: Mapping[str, Any]) -> DrawnProgram:
        """The program of a JSON object."""
        return cls(
            inputs=tuple(DrawnArgument(**_with_shape(value)) for value in read["inputs"]),
            steps=tuple(Step(**_with_shape(value)) for value in read["steps"]),
            outputs=tuple(read["outputs"]),
            gradient=read["gradient"],
            salt=read["salt"],
            mesh=tuple(read["mesh"]),
            specs={name: tuple(tuple(axes) for axes in spec) for name, spec in read["specs"].items()},
        )


def _with_shape(read: Mapping[str, Any]) -> dict[str, Any]:
    return {**read, "shape": tuple(read["shape"])}


def _indices(rng: random.Random, argument: DrawnArgument, normal: str) -> str:
    n = argument.bound or 1
    if math.prod(argument.shape) > 24:
        return f"abs({normal}) * {n / 2}"
    edges = (0, 1, n // 2, n - 2, n - 1, n - 1, n, n + 3, 5 * n + 1, -1, -n, -n - 2, -4 * n)
    drawn = [rng.choice(edges) for _ in range(math.prod(argument.shape))]
    return str(drawn if argument.shape else drawn[0])
