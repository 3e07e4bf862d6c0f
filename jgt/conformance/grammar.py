"""Draws programs: chains of operations from `productions.txt`, and single operations from `operations.txt`.

A production is an expression with fields, such as `{x}`, an earlier value, or `{k}`, an index that is a traced argument and is drawn at the
boundaries of a dim. Values of a program have few different sizes, because the judge compiles each operation once for each shape.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jgt.conformance.layouts import least_met
from jgt.conformance.program import INEXACT, DrawnArgument, DrawnProgram, DrawnValue, Step

SIZES = (8, 8, 12, 16)
"""The sizes of dims. 2 x 2 devices divide 12, and 2 x 2 x 2 do not."""
_MOST = 4096
"""The most numbers of a value."""
_CHOICES = {
    "slice": (":-1", "1:", "0", "-1", "0", "-1", "3", "::2", "1::2", "1:-1", ":2", "-2:", "2:-2", "::-1", ":4", "4:"),
    "update": ("set", "set", "add", "multiply", "max", "min"),
    "number": (0, 2),
    "mode": ("drop", "clip", None),
    "take_mode": ("clip", "fill", "wrap"),
    "pad_mode": ("constant", "edge", "wrap", "reflect"),
    "convolve_mode": ("same", "full", "valid"),
    "dtype": ("bfloat16", "float32", "int32"),
    "segment": ("sum", "max", "min", "prod"),
    "few": (1, 2, 4),
    "groups": (4, 8),
    "one_two": (1, 2),
    "zero_one": (0, 1),
    "flag": (True, False),
    "pool": ("-jnp.inf, lax.max", "0.0, lax.add"),
}
"""The texts that stand for a field. One is drawn for a production."""


@dataclass(frozen=True, kw_only=True)
class Production:
    """An operation that chains may contain. ranks: of its operand."""

    kind: str
    ranks: range
    text: str


@functools.cache
def productions() -> dict[str, list[Production]]:
    """The productions of each kind."""
    found: dict[str, list[Production]] = {}
    for line in _lines("productions.txt"):
        kind, ranks, text = line.split(maxsplit=2)
        low, high = map(int, ranks.split("-"))
        found.setdefault(kind, []).append(Production(kind=kind, ranks=range(low, high + 1), text=text))
    return found


@functools.cache
def single_operations() -> tuple[DrawnProgram, ...]:
    """The single operations, without a layout. Their only step has the shape of no value: the judge knows it."""
    return tuple(map(_operation, _lines("operations.txt")))


def _lines(name: str) -> Iterator[str]:
    text = (Path(__file__).parent / name).read_text()
    return (line for line in text.splitlines() if line and not line.startswith("#"))


def _operation(line: str) -> DrawnProgram:
    shapes, code = re.split(r"\s{2,}", line, maxsplit=1)
    inputs: list[DrawnArgument] = []
    for dtype, bound, shape in re.findall(r"(float32|index(\d+))\[([\d,]+)\]", shapes):
        sizes = tuple(map(int, shape.split(",")))
        number = len(inputs)
        size = int(bound) if bound else None
        inputs.append(DrawnArgument(name=f"x{number}", shape=sizes, dtype="int32" if bound else dtype, seed=number, bound=size))
    step = Step(name="v0", shape=(), dtype="", kind="single", code=code, operand="x0", dim=0)
    return DrawnProgram(inputs=tuple(inputs), steps=(step,), outputs=("v0",), gradient=False, salt=0, specs={})


class Fields(dict[str, object]):
    """The texts that stand for the fields of a production, drawn when they are asked for. inputs: the arguments that it needs."""

    def __init__(self, rng: random.Random, values: Mapping[str, DrawnValue], num_inputs: int):
        self.rng, self._num = rng, num_inputs
        self.inputs: list[DrawnArgument] = []
        operands = [value for value in values.values() if value.shape and min(value.shape) > 1]
        self.operand = operands[-1] if rng.random() < 0.75 else rng.choice(operands)
        same = [name for name, value in values.items() if (value.shape, value.dtype) == (self.operand.shape, self.operand.dtype)]
        others = [name for name in same if name != self.operand.name] or same
        self.shape, self.dim = self.operand.shape, rng.randrange(len(self.operand.shape))
        self.size = self.shape[self.dim]
        super().__init__(x=self.operand.name, y=rng.choice(others), a=self.dim, n=self.size, last=self.shape[-1], same=self.shape)

    def __missing__(self, name: str) -> object:
        self[name] = self.rng.choice(_CHOICES[name]) if name in _CHOICES else _MADE[name](self)
        return self[name]

    def fill(self, text: str) -> str:
        """The text with every field replaced, and `[@` by the index of the dim."""
        return text.replace("[@", "[" + ":, " * self.dim).format_map(self)

    def input(self, shape: tuple[int, ...], bound: int | None = None, dtype: str = "int32") -> str:
        """The name of a new argument: an index, unless it has another type."""
        number = self._num + len(self.inputs)
        self.inputs.append(DrawnArgument(name=f"k{number}", shape=shape, dtype=dtype, seed=number, bound=bound))
        return self.inputs[-1].name

    def along(self, size: object, others: object = 1) -> tuple[object, ...]:
        """A tuple with an entry for each dim of the operand."""
        return tuple(size if dim == self.dim else others for dim in range(len(self.shape)))

    def divided(self) -> tuple[int, ...]:
        """The operand's shape with two dims in the place of one."""
        pair = self.rng.choice(((2, self.size // 2), (self.size // 2, 2), (4, self.size // 4)))
        return (*self.shape[: self.dim], *pair, *self.shape[self.dim + 1 :])


_PADDINGS = ((1, 2, 0), (0, 1, 1), (-1, 2, 0), (-4, 4, 0), (2, -2, 0), (-1, 1, 1))
_MADE: dict[str, Callable[[Fields], object]] = {
    "k": lambda f: f.input((), f.size),
    "ks": lambda f: f.input((8,), f.size),
    "ks_beside": lambda f: f.input((8,), f.shape[1]),
    "k_of_rows": lambda f: f.input((f.shape[0],), f.shape[-1]),
    "ids": lambda f: f.input((f.shape[0],), 8),
    "mask": lambda f: f.input(f.shape, dtype="bool"),
    "cut": lambda f: f.rng.choice((1, f.size // 2, f.size - 1)),
    "window": lambda f: f.rng.choice((1, 2, f.size // 2, f.size - 1)),
    "corner": lambda f: ", ".join(str(f.rng.choice((0, -1, ":"))) for _ in f.shape),
    "around": lambda f: f.along((f.rng.randrange(3), f.rng.randrange(3)), (0, 0)),
    "padding": lambda f: f.along(f.rng.choice(_PADDINGS), (0, 0, 0)),
    "row": lambda f: f.along(f.size),
    "two": lambda f: f.along(2),
    "three": lambda f: f.along(3),
    "stride": lambda f: f.along(f.rng.choice((1, 2))),
    "divided": Fields.divided,
    "merged": lambda f: (f.shape[0] * f.shape[1], *f.shape[2:]),
}
"""The functions that make the texts of the other fields. Indices and masks are new arguments."""

_Shaped = Callable[[DrawnProgram], DrawnProgram]
"""Gives the steps of a program their shapes and types. Raises an exception for a program that JAX refuses."""


def draw_chain(rng: random.Random, met: Counter[str], shaped: _Shaped, hidden: Callable[[DrawnProgram], bool]) -> DrawnProgram:
    """A chain of two to six operations, without a layout. met: how often cells were met. hidden: whether a program is known."""
    rank = rng.choice((1, 2, 2, 2, 3))
    sizes = tuple(rng.choice(SIZES[: 4 if rank < 3 else 2]) for _ in range(rank))
    dtype = rng.choice(("float32",) * 6 + ("bfloat16", "int32"))
    inputs = tuple(DrawnArgument(name=f"x{n}", shape=sizes, dtype=dtype, seed=n) for n in range(rng.choice((1, 2, 2))))
    program = DrawnProgram(inputs=inputs, steps=(), outputs=(), gradient=False, salt=rng.randrange(10**6), specs={})
    length = rng.choice((2, 2, 3, 3, 4, 5, 6))
    for _ in range(5 * length):
        if len(program.steps) == length:
            break
        longer = _with_step(rng, program, met)
        if longer is None or hidden(longer):
            continue
        try:
            longer = shaped(longer)
        except Exception:
            # JAX raises errors of many types for what is not a program.
            continue
        if 0 < math.prod(longer.steps[-1].shape) <= _MOST and len(longer.steps[-1].shape) <= 4:
            program = longer
    return _with_outputs(rng, program)


def _with_step(rng: random.Random, program: DrawnProgram, met: Counter[str]) -> DrawnProgram | None:
    values = program.values
    fields = Fields(rng, {name: value for name, value in values.items() if name[0] in "xv"}, len(program.inputs))
    before = next((step.kind for step in program.steps if step.name == fields.operand.name), "input")
    rank = len(fields.shape)
    fitting = [kind for kind, rows in productions().items() if any(rank in row.ranks for row in rows)]
    kind = least_met(met, rng.sample(fitting, 3), lambda kind: (f"{before} > {kind}",))
    production = rng.choice([row for row in productions()[kind] if rank in row.ranks])
    code = fields.fill(production.text)
    step = Step(name=f"v{len(program.steps)}", shape=(), dtype="", kind=kind, code=code, operand=fields.operand.name, dim=fields.dim)
    return replace(program, inputs=(*program.inputs, *fields.inputs), steps=(*program.steps, step))


def _with_outputs(rng: random.Random, program: DrawnProgram) -> DrawnProgram:
    """The last value alone or all of them are outputs, because outputs change what XLA does."""
    names = [step.name for step in program.steps]
    inexact = [step.name for step in program.steps if step.dtype in INEXACT]
    gradient = bool(inexact) and inexact[-1] == names[-1] and bool(program.moved) and rng.random() < 0.75
    outputs = (inexact if gradient else names) if rng.random() < 0.5 else names[-1:]
    return replace(program, outputs=tuple(outputs), gradient=gradient).pruned()
