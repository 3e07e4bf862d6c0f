"""Patterns: globs over paths such as layers/attn (signals) or layers/attn/out/kernel (parameters).

`*` matches within one level, `**` any number of levels, `?` one character, and `{a,b}` either text.
"""

from __future__ import annotations

import functools
import re

_TOKEN = re.compile(r"\*|\?|\{[^{}]*\}|[^*?{}]+|.")


# The rewriter asks about every pattern for every value that a program computes, and most paths occur again and again.
@functools.lru_cache(maxsize=1 << 16)
def matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a whole path. An empty path is the top of the program; only `**` matches it."""
    # The set of all levels that the pattern may have reached, advanced part by part. A regular expression would try them one after
    # another, which takes exponential time for patterns such as {,a}{,a}{,a}...
    levels = path.split("/") if path else []
    places = {0}
    for part in pattern.split("/"):
        if part == "**":
            # `**` reaches every level behind the earliest place, so the later places add nothing.
            places = set(range(min(places), len(levels) + 1))
        else:
            places = {n + 1 for n in places if n < len(levels) and _level_matches(part, levels[n])}
        if not places:
            return False
    return len(levels) in places


def _level_matches(part: str, level: str) -> bool:
    places = {0}
    for token in _TOKEN.findall(part):
        if token == "*":
            places = set(range(min(places), len(level) + 1))
        elif token == "?":
            places = {n + 1 for n in places if n < len(level)}
        else:
            texts = token[1:-1].split(",") if token[0] == "{" and token[-1] == "}" else [token]
            places = {n + len(text) for n in places for text in texts if level.startswith(text, n)}
        if not places:
            return False
    return len(level) in places


def matches_end(pattern: str, path: str) -> bool:
    """Whether a glob matches the last levels of a path: `out/kernel` matches `layers/attn/out/kernel`."""
    return matches(f"**/{pattern}", path)


def prefixes(path: str) -> list[str]:
    """A signal path and all paths around it, innermost first. For a/b these are a/b, a, and the empty path of the whole program."""
    levels = path.split("/") if path else []
    return ["/".join(levels[:n]) for n in range(len(levels), -1, -1)]
