"""Paths of arrays in trees: the leaves of a tree with their keys, and keys as the text that rules match."""

from __future__ import annotations

from typing import Any, cast

import jax

KeyPath = tuple[Any, ...]
"""The keys that lead to a leaf, as jax.tree_util has them."""


Named = tuple[KeyPath, jax.Array | jax.ShapeDtypeStruct]
"""An array of a call, a tracer or a shape in its place, with its key path, which begins with its place among the arguments."""


def named_leaves(tree: object) -> tuple[list[tuple[KeyPath, Any]], Any]:
    """The leaves of a tree with their key paths, and the structure of the tree."""
    return cast("tuple[list[tuple[KeyPath, Any]], Any]", jax.tree.flatten_with_path(tree))


def path_text(path: KeyPath) -> str:
    """A key path of jax.tree_util as names joined by slashes, without the `value` that ends the path of a Flax variable."""
    # A key of a dict has `key`, one of an attribute has `name`, and one of a list has `idx`.
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    if len(names) > 1 and names[-1] in ("value", "raw_value"):
        names.pop()
    return "/".join(names)
