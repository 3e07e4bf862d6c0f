"""The rules of the signals that a pattern matches: a class for each kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jgt.document import Bound
from jgt.rules.axes import Axis
from jgt.rules.pattern import matches, prefixes
from jgt.rules.spec import OutSpec, SpecRule

Action = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True, kw_only=True)
class SaveRule:
    """The fate of a named tensor until the backward pass: it is kept on the device, recomputed, or offloaded to the host."""

    NAME, VALUE = "name", "action"
    name: str
    action: Action
    # Rules are equal wherever they were written, so a cache whose key contains them finds them again.
    where: str = field(default="rules", compare=False)


@dataclass(frozen=True, kw_only=True)
class OverlapRule:
    """The mesh axis whose sends the matmuls of a signal hide."""

    VALUE = "axis"
    axis: Axis
    where: str = field(default="rules", compare=False)


@dataclass(frozen=True, kw_only=True)
class ExpertsRule:
    """Where the experts of a signal are, and how rows travel to them.

    axis: the mesh axis that holds the experts.
    exchange: how rows travel: by an all-to-all of arrays with a fixed capacity.
    capacity_factor: the rows that each pair of devices has room for, over their number if all experts are chosen equally often.
    over: what becomes of rows beyond the capacity: they are sent in further rounds, or dropped.
    """

    axis: Axis
    exchange: Literal["all-to-all"] = "all-to-all"
    capacity_factor: Annotated[float, Bound(low=1, high=1024)] = 1.25
    over: Literal["rounds", "drop"] = "rounds"
    where: str = field(default="rules", compare=False)


Method = Literal["ring", "gather", "ulysses"]
_Names = Annotated[tuple[str, str, str, str], "Write a list of four names: of q, k, v and of the attention's result"]


@dataclass(frozen=True, kw_only=True)
class ContextRule:
    """The mesh axis that splits the sequence of a signal's attention, and how queries and keys meet.

    axis: the mesh axis that splits the sequence.
    method: how keys reach queries: around a ring, all at once, or by an exchange of rows for heads.
    order: the order of the parts of a sequence in which devices compute; null: zigzag for a causal ring, else plain; zigzag_rows: the rows
    have it already. In zigzag order all devices have equal work under a causal mask.
    between: the names of the tensors q, k and v, and of the attention's result.
    """

    axis: Axis
    method: Method = "ring"
    order: Literal["plain", "zigzag", "zigzag_rows"] | None = None
    between: _Names = ("q", "k", "v", "heads")
    where: str = field(default="rules", compare=False)


@dataclass(frozen=True, kw_only=True)
class BackwardRule:
    """Other specs for the cotangents of a signal.

    out: the spec of the cotangents of the values that leave the signal.
    tensors: the spec of the cotangent of each tensor that signal.tensor names.
    """

    out: OutSpec = None
    tensors: tuple[SpecRule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SignalRule:
    """The rules of the signals that `pattern` matches.

    params: the spec of each parameter that is used below the signal, by the end of its path.
    optimizer: the spec of each parameter's optimizer state and gradient, where it differs from the parameter's.
    tensors: the spec of each tensor that signal.tensor names.
    out: the spec of the floating values that are computed inside the signal and used outside.
    backward: other specs for the cotangents.
    save: what becomes of a named tensor until the backward pass.
    overlap: the mesh axis whose sends run beside the matmuls of the signal, part by part.
    experts: where the experts are that the signal calls, and how rows travel to them.
    context: the mesh axis that splits the sequence of the signal's attention, and how queries and keys meet.
    """

    NAME = "pattern"
    pattern: str
    params: tuple[SpecRule, ...] = ()
    optimizer: tuple[SpecRule, ...] = ()
    tensors: tuple[SpecRule, ...] = ()
    out: OutSpec = None
    backward: BackwardRule | None = None
    save: tuple[SaveRule, ...] = ()
    overlap: OverlapRule | None = None
    experts: ExpertsRule | None = None
    context: ContextRule | None = None
    where: str = field(default="rules", compare=False)

    @property
    def backward_out(self) -> SpecRule | None:
        """The spec of the cotangents of what leaves the signal, where it differs."""
        return self.backward and self.backward.out

    @property
    def backward_tensors(self) -> tuple[SpecRule, ...]:
        """The specs of the cotangents of named tensors, where they differ."""
        return self.backward.tensors if self.backward else ()

    def covers(self, signal: str) -> bool:
        """Whether the pattern matches this signal or one around it."""
        return any(matches(self.pattern, prefix) for prefix in prefixes(signal))

    def spec_rules(self) -> Iterator[SpecRule]:
        """Every spec of this rule."""
        yield from (*self.params, *self.optimizer, *self.tensors, *self.backward_tensors)
        yield from (rule for rule in (self.out, self.backward_out) if rule is not None)
