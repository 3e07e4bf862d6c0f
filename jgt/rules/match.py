"""Globs over signal paths and parameter names: `*` within one level, `**` any levels, `?`, `{a,b}`."""

from __future__ import annotations

import functools
import re

_TOKEN = re.compile(r"\*|\?|\{[^{}]*\}|[^*?{}]+|.")


@functools.lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    parts = [_level(level) for level in pattern.split("/")]
    return re.compile("".join(parts).removesuffix("/"))


def _level(level: str) -> str:
    if level == "**":
        return "(?:[^/]+/)*"
    text = "(?=[^/])"  # a level is never empty
    for token in _TOKEN.findall(level):
        if token == "*":
            text += "[^/]*"
        elif token == "?":
            text += "[^/]"
        elif token[0] == "{" and token[-1] == "}":
            text += "(?:" + "|".join(map(re.escape, token[1:-1].split(","))) + ")"
        else:
            text += re.escape(token)
    return text + "/"


def matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a whole path. An empty path is the top of the program; only `**` matches it."""
    regex = _compile(pattern)
    return bool(regex.fullmatch(path) or regex.fullmatch(path + "/"))


def matches_end(pattern: str, path: str) -> bool:
    """Whether a glob matches the last levels of a path: `out/kernel` matches `layers/attn/out/kernel`."""
    return matches(f"**/{pattern}", path)


def prefixes(path: str) -> list[str]:
    """A signal path and all that is around it, innermost first: a/b, a and the top of the program, which is empty."""
    levels = path.split("/") if path else []
    return ["/".join(levels[:n]) for n in range(len(levels), -1, -1)]
