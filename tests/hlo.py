"""A reader for the text of compiled programs: what loops run, which mesh axes a collective spans, what a value is made of."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"[a-z]+\d*\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)=(\{[^}]*\}|%\S+)"
)
_EXPLICIT = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line. operands: names in the same computation; called: names of computations; text: all after the operands' bracket."""

    name: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str

    @property
    def kind(self) -> str:
        """The op, an asynchronous one by its start."""
        return self.op.removesuffix("-start")

    @property
    def sizes(self) -> list[int]:
        """The elements of each array in the result."""
        return [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes]

    def attribute(self, name: str) -> str:
        """The value of name=value."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^\s,]+)", self.text)
        assert found, f"{self.op} {self.name} has no {name}"
        return found[1].removeprefix("%")


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in order. root: the name of the result."""

    instructions: Mapping[str, Instruction]
    root: str

    @property
    def parameters(self) -> dict[int, str]:
        """Names by number."""
        return {int(i.text.partition(")")[0]): name for name, i in self.instructions.items() if i.op == "parameter"}


@dataclass(frozen=True)
class Module:
    """A compiled program. entry: the name of the computation that it starts with."""

    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def of(cls, text: str) -> "Module":
        """From `compiled.as_text()`."""
        computations, entry, name, found, root = {}, "", "", {}, ""
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                name, found, root = header[1], {}, ""
                entry = name if line.startswith("ENTRY") else entry
            elif line == "}":
                computations[name] = Computation(found, root)
            elif name and (match := _INSTRUCTION.match(line)):
                instruction = _instruction(*match.groups()[1:])
                found[instruction.name] = instruction
                root = instruction.name if match[1] else root
        return cls(computations, entry)

    def instructions(self, *, within: frozenset[str] | None = None) -> Iterator[Instruction]:
        """All of them, or those of some computations."""
        for name, computation in self.computations.items():
            if within is None or name in within:
                yield from computation.instructions.values()

    @cached_property
    def looped(self) -> frozenset[str]:
        """The computations that a loop runs, and all that those call."""
        pending = [name for i in self.instructions() if i.op == "while" for name in i.called]
        found: set[str] = set()
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending += [c for i in self.computations[name].instructions.values() for c in i.called]
        return frozenset(found)

    def collectives(self, *, in_loops: bool) -> list[Instruction]:
        """Those that loops run, or the others."""
        within = self.looped if in_loops else frozenset(self.computations) - self.looped
        return [i for i in self.instructions(within=within) if i.kind in COLLECTIVES]

    def conditionals(self) -> Iterator[tuple[str, Instruction]]:
        """Each with the name of the computation that it stands in."""
        for name, computation in self.computations.items():
            yield from ((name, i) for i in computation.instructions.values() if i.op == "conditional")

    def sources(self, computation: str, name: str) -> set[str]:
        """The ops that a value is computed by: through calls, loops and tuples, element by element; "argument" for the program's own."""
        found: set[str] = set()
        seen: set[tuple[str, str, tuple[int, ...]]] = set()
        pending: list[tuple[str, str, tuple[int, ...]]] = [(computation, name, ())]
        while pending:
            item = pending.pop()
            if item not in seen:
                seen.add(item)
                op = self.computations[item[0]].instructions[item[1]].op
                found.add("argument" if op == "parameter" and item[0] == self.entry else op)
                pending += self._before(*item)
        return found

    def _before(self, computation: str, name: str, path: tuple[int, ...]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """What element `path` of a value comes from."""
        instruction = self.computations[computation].instructions[name]
        op, operands = instruction.op, instruction.operands
        if op == "parameter":
            yield from ((c, n, path) for c, n in self._given(computation, name))
        elif op == "get-tuple-element":
            yield computation, operands[0], (int(instruction.attribute("index")), *path)
        elif op == "tuple" and path:
            yield computation, operands[path[0]], path[1:]
        elif op == "while":
            body = instruction.attribute("body")
            yield computation, operands[0], path
            yield body, self.computations[body].root, path
        elif op in ("fusion", "call", "conditional"):
            if op == "conditional":
                yield computation, operands[0], ()
            yield from ((called, self.computations[called].root, path) for called in instruction.called)
        else:
            yield from ((computation, operand, ()) for operand in operands)

    def _given(self, computation: str, parameter: str) -> Iterator[tuple[str, str]]:
        """What callers give for a parameter."""
        number = next(n for n, p in self.computations[computation].parameters.items() if p == parameter)
        for name, caller in self._callers.get(computation, ()):
            if caller.op == "while":
                yield name, caller.operands[0]
                body = caller.attribute("body")
                yield body, self.computations[body].root
            elif caller.op == "conditional":
                yield from ((name, o) for o, c in zip(caller.operands[1:], caller.called, strict=True) if c == computation)
            elif caller.op in ("fusion", "call"):
                yield name, caller.operands[number]
            else:
                # What reduce, scatter and the like call sees parts of any of their operands.
                yield from ((name, operand) for operand in caller.operands)

    @cached_property
    def _callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        found: dict[str, list[tuple[str, Instruction]]] = {}
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                for called in dict.fromkeys(instruction.called):
                    found.setdefault(called, []).append((name, instruction))
        return found


def _instruction(name: str, shape: str, op: str, rest: str) -> Instruction:
    operands = rest if op == "parameter" else rest.partition(")")[0]
    return Instruction(
        name=name,
        op=op,
        shapes=tuple(tuple(int(d) for d in dims.split(",") if d) for dims in _SHAPE.findall(shape)),
        operands=() if op in ("parameter", "constant") else tuple(_NAME.findall(operands)),
        called=tuple(itertools.chain.from_iterable(_NAME.findall(called) for called in _CALLED.findall(rest))),
        text=rest,
    )


def spanned(collective: Instruction, mesh: Mapping[str, int]) -> frozenset[str]:
    """The axes of a mesh that a collective talks along: those in which devices of one group differ."""
    sizes = tuple(mesh.values())
    axes: set[str] = set()
    for group in _groups(collective.text, int(np.prod(sizes))):
        places = np.stack(np.unravel_index(np.array(group), sizes))
        axes |= {axis for axis, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1}
    return frozenset(axes)


def _groups(text: str, num_devices: int) -> list[tuple[int, ...]]:
    """The groups of device numbers, or pairs of source and target, whichever way they are written."""
    if found := _EXPLICIT.search(text):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1])]
    if found := _IOTA.search(text):
        shape, dims = _numbers(found[1]), _numbers(found[2])
        order = _numbers(found[3]) if found[3] else range(len(dims))
        return [tuple(row) for row in np.arange(num_devices).reshape(dims).transpose(order).reshape(shape).tolist()]
    if found := _MESH.search(text):
        sizes = {name: int(size) for name, size in (part.split("=") for part in found[1].split(","))}
        grouped = found[2].split(",")
        assert set(grouped) <= sizes.keys(), f"groups over parts of axes are not read here: {found[0]}"
        order = [i for own in (False, True) for i, name in enumerate(sizes) if (name in grouped) is own]
        ids = np.arange(num_devices).reshape(tuple(sizes.values())).transpose(order)
        return [tuple(row) for row in ids.reshape(-1, int(np.prod([sizes[name] for name in grouped]))).tolist()]
    raise AssertionError(f"no groups in {text[:200]}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))
