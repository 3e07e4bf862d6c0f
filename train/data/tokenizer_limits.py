"""The limits of a tokenizer.json, which are checked before the package `tokenizers` reads it.

The package builds what the file asks for, however large: forty replacements of `a` by `aa` make a text of ten letters longer than any
memory, and an added token of fifty megabytes takes gigabytes. So what a file's normalizers, decoders and other parts can do to the length
of a text is bounded by their product, whatever the text, and so are the texts inside the file. Patterns need no limit: their matcher has
its own.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from itertools import chain

from ..files.json_text import json_value

_MOST_BRACKETS, _MOST_QUOTES = 4_000_000, 16_000_000
"""Those of the largest published files are an eighth of it. They bound the memory of a file that is read."""
_MOST_GROWTH = 200
_LONGEST, _LONGEST_MAP, _MOST_LETTERS = 10_000, 4_000_000, 6_000_000
"""The most characters of a text in the file, of a map of characters, and of all tokens and other texts together."""
_GROWTH = {"NFKC": 4, "NFKD": 4, "NFC": 4, "NFD": 4, "BertNormalizer": 4, "ByteLevel": 2, "Metaspace": 2}
"""The factor by which each of these may make a text longer."""
_MAP = "precompiled_charsmap"


def limit_problem(data: bytes) -> str | None:
    """Why a tokenizer.json could take any time or memory. None: it cannot, or it is not JSON, which its reader says."""
    if data.count(b"[") + data.count(b"{") > _MOST_BRACKETS or data.count(b'"') > _MOST_QUOTES:
        return f"has more than {_MOST_BRACKETS:,} brackets or {_MOST_QUOTES:,} quotes"
    try:
        tree = json_value(data)
        model, decoder = tree.pop("model"), tree.pop("decoder", None)
        # The parts that encode a text run one after another.
        growth = max(_growth(decoder), _growth(tree))
        if growth > _MOST_GROWTH:
            return f"makes texts up to {growth:,.0f} times as long; at most {_MOST_GROWTH} times are allowed"
        # What is merged are tokens.
        sizes = [*map(len, _texts([tree, decoder, {key: value for key, value in model.items() if key != "merges"}]))]
    # Its reader knows what is missing.
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return None
    if (longest := max(sizes)) > _LONGEST:
        return f"has a text of {longest:,} characters; at most {_LONGEST:,} are allowed"
    return f"has {sum(sizes):,} characters in its tokens; at most {_MOST_LETTERS:,} are allowed" if sum(sizes) > _MOST_LETTERS else None


def _growth(node: object) -> float:
    """The factor by which a part of the file, with all parts in it, may make a text longer."""
    if isinstance(node, list):
        return math.prod(map(_growth, node))
    if not isinstance(node, dict):
        return 1.0
    kind, content, pattern = node.get("type"), node.get("content") or "", node.get("pattern") or {}
    factor = float(_GROWTH.get(kind, 1)) if isinstance(kind, str) else 1.0
    if kind == "Replace":
        # A pattern may match an empty text between any two characters.
        factor = len(content) / len(pattern["String"]) if pattern.get("String") else len(content) + 1.0
    elif kind == "Prepend":
        factor = len(node["prepend"]) + 1.0
    elif kind == "TemplateProcessing":
        factor = sum(1.0 for piece in node["single"] if "Sequence" in piece)
    elif kind == "Precompiled" and node.get(_MAP):
        # The size of a table, the table, and texts between zero bytes. One is for a character of three bytes at most.
        table = base64.b64decode(node[_MAP])
        factor = max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0"))) / 3
    return max(1.0, factor) * math.prod(map(_growth, node.values()))


def _texts(node: object) -> Iterator[str]:
    """All texts in a part of the file, but for maps of characters."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        yield from chain.from_iterable(map(_texts, node))
    elif isinstance(node, dict):
        yield from node
        yield from chain.from_iterable(_texts(value) for key, value in node.items() if key != _MAP or len(value) > _LONGEST_MAP)
