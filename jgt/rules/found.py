"""Rules written down: from the layouts that a program asks for to a rules file.

Each entry has the line of the program that it comes from. Entries that differ in numbers alone (`layers_0/attn`, `layers_1/attn`) become
one pattern if all of them say the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jgt.rules.load import make_rules
from jgt.rules.rules import Rules

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class FoundSpec:
    """The axes that a program gives to each dim of an array.

    path: the path of a parameter or an input, or the name of a tensor.
    where: the file:line of the program.
    signal: the region of a tensor.
    """

    path: str
    dims: tuple[tuple[str, ...], ...]
    where: str = ""
    signal: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The layout that a program has, as rules.

    mesh: the axes of its mesh and their sizes.
    params, inputs, tensors: what has a layout.
    unsaid: what rules cannot say, each with its line.
    """

    mesh: Mapping[str, int]
    params: tuple[FoundSpec, ...] = ()
    inputs: tuple[FoundSpec, ...] = ()
    tensors: tuple[FoundSpec, ...] = ()
    unsaid: tuple[str, ...] = field(default=())

    @property
    def rules(self) -> Rules:
        """The rules, to be given to `jgt.shard`."""
        return make_rules(self.tree)

    @property
    def tree(self) -> dict[str, Any]:
        """The mapping that the rules file contains."""
        return {section: {key: _plain(value) for key, value in entries.items()} for section, entries in self._sections.items()} | {
            "default": "replicate"
        }

    def __str__(self) -> str:
        """The rules file."""
        sizes = ", ".join(f"{axis}: {size}" for axis, size in self.mesh.items())
        lines = [f"# The layout that the program has on a mesh of {{{sizes}}}."]
        lines += [f"# Not in these rules: {what}" for what in self.unsaid]
        for section, entries in self._sections.items():
            lines += [f"{section}:", *_lines(entries, "  ")] if entries else [f"{section}: {{}}"]
        return "\n".join([*lines, "default: replicate", ""])

    @property
    def _sections(self) -> dict[str, dict[str, Any]]:
        signals: dict[str, list[FoundSpec]] = {}
        for entry in self.tensors:
            signals.setdefault(entry.signal, []).append(entry)
        # Innermost first: the rules of a signal cover those inside of it.
        ordered = sorted(_folded({signal: _by_path(entries) for signal, entries in signals.items()}).items(), key=_depth)
        return {
            "inputs": _folded(_by_path(self.inputs)),
            "params": _folded({entry.path or "**": entry for entry in self.params if any(entry.dims)}),
            "signals": {signal or "**": {"tensors": tensors} for signal, tensors in ordered},
        }


def _by_path(entries: Iterable[FoundSpec]) -> dict[str, Any]:
    return {entry.path: entry for entry in entries}


def _depth(item: tuple[str, Any]) -> int:
    return -len(item[0].split("/")) if item[0] else 0


def _folded(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of one pattern for all paths that differ in numbers alone and say the same."""
    groups: dict[str, list[str]] = {}
    for path in entries:
        groups.setdefault(_NUMBER.sub("*", path), []).append(path)
    folded: dict[str, Any] = {}
    for pattern, paths in groups.items():
        first = entries[paths[0]]
        if len(paths) > 1 and all(_plain(entries[path]) == _plain(first) for path in paths):
            folded[pattern] = first
        else:
            folded |= {path: entries[path] for path in paths}
    return folded


def _plain(value: Any) -> Any:
    if isinstance(value, FoundSpec):
        # An empty spec fits every rank.
        return [list(axes) or None for axes in value.dims]
    return {key: _plain(child) for key, child in value.items()}


def _lines(entries: Mapping[str, Any], indent: str) -> Iterable[str]:
    for key, value in entries.items():
        if isinstance(value, FoundSpec):
            spec = ", ".join("null" if not axes else axes[0] if len(axes) == 1 else f"[{', '.join(axes)}]" for axes in value.dims)
            line = f"{indent}{_key(key)}: [{spec}]"
            yield f"{line:55} # {value.where}" if value.where else line
        else:
            yield f"{indent}{_key(key)}:"
            yield from _lines(value, indent + "  ")


def _key(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else json.dumps(text)
