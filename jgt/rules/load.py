"""Rules from YAML or from Python objects.

A rules file is read entry by entry, and every mistake is noted with its line while reading continues: unknown keys,
specs that are not lists, axes that appear twice. At the end either the rules are complete or one InputError has all problems.
Whether the axes exist, the dims divide and the patterns match is checked later, when a mesh and a program are known.

Names under `axes:` are abbreviations for several mesh axes. They are replaced while reading, so nothing after this file knows them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from jgt import document
from jgt.document import InputError, Node, nearest
from jgt.rules.rules import Action, ContextRule, ExpertsRule, Method, Order, Overflow, OverlapRule, Rules, SaveRule, SignalRule
from jgt.rules.spec import Entry, Spec, SpecRule

TOP_KEYS = ("axes", "inputs", "params", "optimizer", "signals", "default")
SIGNAL_KEYS = ("params", "optimizer", "tensors", "out", "backward", "save", "overlap", "experts", "context")
EXPERTS_KEYS = ("axis", "exchange", "room", "over")
EXCHANGES = ("all-to-all",)
OVERFLOWS = ("rounds", "drop")
CONTEXT_KEYS = ("axis", "method", "order", "between")
METHODS = ("ring", "gather", "ulysses")
ORDERS = ("plain", "zigzag", "zigzag_rows")
BACKWARD_KEYS = ("out", "tensors")
ACTIONS = ("keep", "recompute", "offload")
DEFAULT_ROOM = 1.25
MAX_ROOM = 1024
MAX_AXES = 32
"""The most axes that a mesh can have. A group is written out wherever its name appears, so its length is limited."""


def load_rules(path: str | Path) -> Rules:
    """Reads a rules file, or a shipped one (`jgt:fsdp`), following `extends:`. Raises InputError with every problem and its file:line."""
    return make_rules(document.read(path, Rules.FOLDER))


def _plain(value: Any) -> Any:
    """The mapping with jax.P(...) as lists: like JAX, such a spec may leave out trailing dims."""
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in cast("Mapping[Any, Any]", value).items()}
    # Reading rules does not import JAX; a spec of JAX exists only if the caller has imported it.
    spec = getattr(sys.modules.get("jax.sharding"), "PartitionSpec", None)
    if spec is not None and isinstance(value, spec):
        return [*cast("Iterable[Any]", value), ...]
    return value


def make_rules(tree: Mapping[str, Any] | Node) -> Rules:
    """Rules from the mapping that a rules file contains, as a document's or built in code. Raises InputError with every problem."""
    root = tree if isinstance(tree, Node) else document.Node.of(_plain(tree), "rules")
    reader = _Reader()
    # `document.read` resolves the key of a file and removes it, so here it can only come from rules without a file of
    # their own.
    inherited = root.value.get("extends") if isinstance(root.value, dict) else None
    if inherited is not None:
        raise InputError([inherited.problem("only a file can extend another; write rules: PATH, and extends: in that file")])
    rules = reader.rules(root)
    if reader.problems:
        raise InputError(reader.problems)
    return rules


class _Reader:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.groups: dict[str, tuple[str, ...]] = {}

    def rules(self, root: Node) -> Rules:
        parts = self._section(root, TOP_KEYS)
        # The groups are read before any spec, because specs are expanded while they are read.
        for name, node in self._children(parts.get("axes")).items():
            self.groups[name] = self._group(node)
        default = parts.get("default")
        if default is not None and default.value not in (None, "replicate"):
            self._problem(
                default,
                f"{default.in_words()} is not allowed; write `replicate`, or leave it out so that an unmatched parameter is an error",
            )
        return Rules(
            signals=tuple(self._signal(name, node) for name, node in self._children(parts.get("signals")).items()),
            params=self._specs(parts.get("params")),
            optimizer=self._specs(parts.get("optimizer")),
            inputs=self._inputs(parts.get("inputs"), root),
            default="replicate" if default is not None and default.value == "replicate" else None,
            where=root.where,
        )

    def _signal(self, pattern: str, node: Node) -> SignalRule:
        parts = self._section(node, SIGNAL_KEYS)
        backward = self._section(parts["backward"], BACKWARD_KEYS) if "backward" in parts else {}
        return SignalRule(
            pattern=pattern,
            params=self._specs(parts.get("params")),
            optimizer=self._specs(parts.get("optimizer")),
            tensors=self._specs(parts.get("tensors")),
            out=self._out(pattern, parts.get("out")),
            backward_out=self._out(pattern, backward.get("out")),
            backward_tensors=self._specs(backward.get("tensors")),
            save=tuple(self._save(name, child) for name, child in self._children(parts.get("save")).items()),
            overlap=self._overlap(parts.get("overlap")),
            experts=self._experts(parts.get("experts")),
            context=self._context(parts.get("context")),
            where=node.where,
        )

    def _overlap(self, node: Node | None) -> OverlapRule | None:
        axis = None if node is None or node.value is None else self._one_axis(node)
        return None if axis is None else OverlapRule(axis=axis, where=cast(Node, node).where)

    def _experts(self, node: Node | None) -> ExpertsRule | None:
        if node is None or node.value is None:
            return None
        parts = self._section(node, EXPERTS_KEYS)
        if "axis" not in parts:
            self._problem(node, "needs the mesh axis that holds the experts: {axis: expert}")
            return None
        self._one_of(parts.get("exchange"), EXCHANGES)
        over = self._one_of(parts.get("over"), OVERFLOWS)
        room = self._room(parts.get("room"))
        axis = self._one_axis(parts["axis"])
        if axis is None:
            return None
        return ExpertsRule(axis=axis, room=room, over=cast(Overflow, over), where=node.where)

    def _context(self, node: Node | None) -> ContextRule | None:
        if node is None or node.value is None:
            return None
        parts = self._section(node, CONTEXT_KEYS)
        if "axis" not in parts:
            self._problem(node, "needs the mesh axis that splits the sequence: {axis: seq}")
            return None
        method, axis = self._one_of(parts.get("method"), METHODS), self._one_axis(parts["axis"])
        order = cast(Order, self._one_of(parts["order"], ORDERS)) if "order" in parts else None
        between = ContextRule.between
        if "between" in parts:
            names = parts["between"].value
            if isinstance(names, list) and len(names) == 4 and all(isinstance(child.value, str) for child in names):
                between = cast("tuple[str, str, str, str]", tuple(child.value for child in names))
            else:
                self._problem(parts["between"], "is a list of four names: of q, k, v and of the attention's result")
        return None if axis is None else ContextRule(axis=axis, method=cast(Method, method), order=order, between=between, where=node.where)

    def _room(self, node: Node | None) -> float:
        if node is None:
            return DEFAULT_ROOM
        number = node.value
        if isinstance(number, bool) or not isinstance(number, int | float) or not 1 <= number <= MAX_ROOM:
            self._problem(
                node, f"room is a number from 1 to {MAX_ROOM}, not {node.in_words()}: the rows of a pair of devices over their mean"
            )
            return DEFAULT_ROOM
        return float(number)

    def _one_of(self, node: Node | None, known: tuple[str, ...]) -> str:
        if node is None:
            return known[0]
        if node.value not in known:
            near = nearest(node.value, known, lists=False) if isinstance(node.value, str) else ""
            self._problem(node, f"{node.in_words()} is not one of {', '.join(known)}. {near}".rstrip())
            return known[0]
        return node.value

    def _one_axis(self, node: Node) -> str | None:
        axes = list(self._axis(node))
        if len(axes) > 1:
            self._problem(node, f"is one mesh axis, but {node.value!r} stands for {', '.join(axes)}. Write one of them")
        return next(iter(axes), None)

    def _out(self, pattern: str, node: Node | None) -> SpecRule | None:
        return None if node is None else SpecRule(pattern=pattern, spec=self._spec(node), where=node.where)

    def _inputs(self, node: Node | None, root: Node) -> tuple[SpecRule, ...]:
        if node is None:
            if "batch" not in self.groups:
                return ()
            # The implicit rule for inputs has no line. It gets the line of the group, which the user wrote.
            where = root.find("axes.batch").where
            return (SpecRule(pattern="**", spec=(self.groups["batch"], ...), where=where),)
        if isinstance(node.value, list):
            return (SpecRule(pattern="**", spec=self._spec(node), where=node.where),)
        return self._specs(node)

    def _specs(self, node: Node | None) -> tuple[SpecRule, ...]:
        return tuple(SpecRule(pattern=name, spec=self._spec(child), where=child.where) for name, child in self._children(node).items())

    def _save(self, name: str, node: Node) -> SaveRule:
        return SaveRule(name=name, action=cast(Action, self._one_of(node, ACTIONS)), where=node.where)

    def _spec(self, node: Node) -> Spec:
        if not isinstance(node.value, list):
            self._problem(
                node,
                f"a spec is a list with an axis, a list of axes, null or `...` for each dim ([] replicates), not {node.in_words()}",
            )
            # After a problem the spec must not cause another one. This one fits every rank.
            return (...,)
        entries = tuple(self._entry(child) for child in node.value)
        if entries.count(...) > 1:
            self._problem(node, "`...` may appear only once in a spec")
        for axis in _doubled(axis for entry in entries if entry is not ... for axis in entry):
            self._problem(
                node, f"the axis {axis!r} appears twice in one spec, but an axis can shard only one dim of a tensor. Remove one of them"
            )
        # `[]` replicates a tensor of any rank, which only `...` can say.
        return entries or (...,)

    def _entry(self, node: Node) -> Entry:
        if node.value is None:
            return ()
        if node.value == "...":
            return ...
        if isinstance(node.value, str):
            return self._axis(node)
        if isinstance(node.value, list):
            return tuple(axis for child in node.value for axis in self._axis(child))
        self._problem(node, f"a spec entry is an axis, a list of axes, null or `...`, not {node.in_words()}")
        return ()

    def _axis(self, node: Node) -> tuple[str, ...]:
        if not isinstance(node.value, str) or node.value == "...":
            self._problem(node, f"must be the name of a mesh axis or of a group in axes:, not {node.in_words()}")
            return ()
        return self.groups.get(node.value, (node.value,))

    def _group(self, node: Node) -> tuple[str, ...]:
        # A group of one axis may be written without brackets.
        children = node.value if isinstance(node.value, list) else [node]
        names = [child.value for child in children if isinstance(child.value, str)]
        if len(names) < len(children):
            self._problem(node, "an axes group is a list of mesh axes, for example batch: [data, fsdp]")
            return ()
        if len(names) > MAX_AXES:
            self._problem(node, f"has {len(names):,} axes; a mesh has at most {MAX_AXES}")
            return ()
        for axis in _doubled(names):
            self._problem(node, f"the axis {axis!r} appears twice in one group. Remove one of them")
        return tuple(names)

    def _section(self, node: Node, known: tuple[str, ...]) -> dict[str, Node]:
        children = self._children(node)
        for name, child in children.items():
            if name not in known:
                self._problem(child, f"unknown key. {nearest(name, known)}")
        return {name: child for name, child in children.items() if name in known}

    def _children(self, node: Node | None) -> dict[str, Node]:
        if node is None or node.value is None:
            return {}
        if not isinstance(node.value, dict):
            self._problem(node, f"must be a mapping of keys to values, not {node.in_words()}")
            return {}
        return node.value

    def _problem(self, node: Node, message: str) -> None:
        self.problems.append(node.problem(message))


def _doubled(axes: Iterable[str]) -> list[str]:
    return [axis for axis, count in Counter(axes).items() if count > 1]
