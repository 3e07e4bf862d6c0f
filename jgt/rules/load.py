"""Rules from YAML or from Python objects.

`jgt.document.bind` fills the classes of `rules.py`, and notes every mistake with its line while reading continues. Whether the axes exist,
the dims divide and the patterns match is checked later, when a mesh and a program are known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from jgt import document
from jgt.document import InputError, Node, bind
from jgt.rules.axes import Group, read_group
from jgt.rules.rules import Rules
from jgt.rules.signals import SignalRule


@dataclass(frozen=True, kw_only=True)
class RulesFile(Rules):
    """The keys of a rules file.

    axes: names for mesh axes, or for lists of them. By default, dim 0 of every input is split over the axes of `batch`.
    """

    axes: dict[str, Group] | None = None


def load_rules(path: str | Path) -> Rules:
    """Reads the rules in a file, following its `extends:`.

        rules = jgt.load_rules("jgt:fsdp")

    path: a YAML file, or `jgt:NAME` for one that jgt ships.

    Raises InputError with every problem and its file:line.
    """
    return make_rules(document.read(path, Rules.FOLDER))


def make_rules(tree: Mapping[str, Any] | Node) -> Rules:
    """Reads rules from the mapping that a rules file contains.

        rules = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"})

    tree: a mapping that was built in code, where `...` and jax.P may stand in specs, or a part of a document.

    Raises InputError with every problem.
    """
    root = tree if isinstance(tree, Node) else Node.of(_plain(tree), "rules")
    # `document.read` resolves the key of a file and removes it, so here it can only come from rules without a file of
    # their own.
    if "extends" in root.children:
        problem = "only a file can extend another; write rules: PATH, and extends: in that file"
        raise InputError([root.children["extends"].problem(problem)])
    # The groups are read before any spec, because specs are expanded while they are read. `bind` reports their problems.
    groups = {name: read_group(node, []) for name, node in root.find("axes").children.items()}
    problems: list[str] = []
    file = bind(_with_inputs(root, groups), RulesFile, problems, groups)
    if file is None:
        raise InputError(problems)
    values = {field.name: getattr(file, field.name) for field in fields(Rules)}
    implied = "inputs" not in root.children and "batch" in groups
    return replace(Rules(**values), signals=tuple(map(_with_name, file.signals)), is_batch_implied=implied)


def _plain(value: Any) -> Any:
    """The mapping with jax.P(...) as lists: like JAX, such a spec may leave out trailing dims."""
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in cast("Mapping[Any, Any]", value).items()}
    # Reading rules does not import JAX; a spec of JAX exists only if the caller has imported it.
    spec = getattr(sys.modules.get("jax.sharding"), "PartitionSpec", None)
    if spec is not None and isinstance(value, spec):
        return [*cast("Iterable[Any]", value), ...]
    return value


def _with_inputs(root: Node, groups: Mapping[str, object]) -> Node:
    """The file with a mapping under `inputs`: one spec is that of all inputs, and by default they follow the group `batch`."""
    node = root.children.get("inputs")
    if node is None and "batch" in groups:
        # The implicit rule has no line. It gets the line of the group, which the user wrote.
        node = Node.of(["batch", ...], root.find("axes.batch").where, "inputs")
    if node is None or not isinstance(node.value, list):
        return root
    return replace(root, value={**root.children, "inputs": replace(node, value={"**": node})})


def _with_name(rule: SignalRule) -> SignalRule:
    """The rule of a signal, whose specs of `out` have its pattern for messages."""
    out, backward = rule.out, rule.backward
    if backward is not None and backward.out is not None:
        backward = replace(backward, out=replace(backward.out, pattern=rule.pattern))
    return replace(rule, out=out and replace(out, pattern=rule.pattern), backward=backward)
