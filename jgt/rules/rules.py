"""Rules: what happens at which signal. Frozen and hashable, because they are part of what is traced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from jgt.document import nearest
from jgt.rules.match import matches, prefixes
from jgt.rules.spec import SpecRule, axes_in

Action = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True, kw_only=True)
class SaveRule:
    """What the backward pass finds of a named tensor: kept on the device, recomputed, or offloaded to the host."""

    name: str
    action: Action
    where: str = field(default="rules", compare=False)


@dataclass(frozen=True, kw_only=True)
class SignalRule:
    """What happens at the signals that `pattern` matches.

    params and optimizer speak of parameters used below the signal, tensors and save of tensors named below it, out of
    the floating values that leave it; backward_out and backward_tensors of the cotangents where they differ.
    """

    pattern: str
    params: tuple[SpecRule, ...] = ()
    optimizer: tuple[SpecRule, ...] = ()
    tensors: tuple[SpecRule, ...] = ()
    out: SpecRule | None = None
    backward_out: SpecRule | None = None
    backward_tensors: tuple[SpecRule, ...] = ()
    save: tuple[SaveRule, ...] = ()
    where: str = field(default="rules", compare=False)

    def covers(self, signal: str) -> bool:
        """Whether the pattern matches this signal or one around it."""
        return any(matches(self.pattern, prefix) for prefix in prefixes(signal))

    def spec_rules(self) -> Iterator[SpecRule]:
        """Every spec of this rule."""
        yield from (*self.params, *self.optimizer, *self.tensors, *self.backward_tensors)
        yield from (rule for rule in (self.out, self.backward_out) if rule is not None)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of one program, in order of precedence.

    params and optimizer here hold whatever the signal (a tied parameter needs that); inputs speak of the arguments
    that are not parameters; default is what an unmatched parameter gets (None: an error).
    """

    signals: tuple[SignalRule, ...] = ()
    params: tuple[SpecRule, ...] = ()
    optimizer: tuple[SpecRule, ...] = ()
    inputs: tuple[SpecRule, ...] = ()
    default: Literal["replicate"] | None = None
    where: str = field(default="rules", compare=False)

    def spec_rules(self) -> Iterator[SpecRule]:
        """Every spec in the rules."""
        yield from (*self.params, *self.optimizer, *self.inputs)
        for rule in self.signals:
            yield from rule.spec_rules()

    def where_of(self, signal: str) -> str:
        """The file:line of the first rule for a signal, or else for the nearest one around it; empty where there is none."""
        for path in prefixes(signal):
            for rule in self.signals:
                if path and matches(rule.pattern, path):
                    return rule.where
        return ""

    def axis_problems(self, axes: Iterable[str]) -> Iterator[str]:
        """Problems with axes that a mesh of these axes does not have."""
        known = tuple(axes)
        for rule in self.spec_rules():
            for axis in dict.fromkeys(axes_in(rule.spec)):
                if axis not in known:
                    yield (
                        f"{rule.where}: {rule.pattern}: the mesh has no axis {axis!r}. {nearest(axis, known)} "
                        f"To turn the axis off, give it the size 1 in mesh: {{{axis}: 1}}"
                    )
