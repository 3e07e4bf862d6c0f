"""Globs over signal paths, compared with a matcher that tries every possibility."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgt.rules.pattern import matches, matches_end, prefixes


def slow_level(pattern, text):
    """Matches one level: tries every possibility for each character of the pattern."""
    if not pattern:
        return not text
    head, rest = pattern[0], pattern[1:]
    if head == "*":
        return any(slow_level(rest, text[n:]) for n in range(len(text) + 1))
    if head == "{":
        options, rest = pattern[1:].split("}", 1)
        return any(text.startswith(o) and slow_level(rest, text[len(o) :]) for o in options.split(","))
    return bool(text) and (head in ("?", text[0])) and slow_level(rest, text[1:])


def slow(pattern, path):
    """Matches all levels: tries every number of levels for `**`."""
    if not pattern:
        return not path
    assert "" not in path
    if pattern[0] == "**":
        return any(slow(pattern[1:], path[n:]) for n in range(len(path) + 1))
    return bool(path) and slow_level(pattern[0], path[0]) and slow(pattern[1:], path[1:])


levels = st.lists(st.sampled_from(["a", "b", "ab", "ba", "a.b", "abc"]), max_size=4)
pieces = st.lists(st.sampled_from(["a", "b", "?", "*", "{a,b}", "{ab,b}", "."]), min_size=1, max_size=3).map("".join)
patterns = st.lists(st.just("**") | pieces.filter(lambda p: p != "**"), min_size=1, max_size=4)


@given(patterns, levels)
def test_a_glob_matches_what_the_slow_matcher_does(pattern, path):
    assert matches("/".join(pattern), "/".join(path)) == slow(pattern, path)


@given(patterns, levels)
def test_an_end_matches_any_last_levels(pattern, path):
    ends = ["/".join(path[n:]) for n in range(len(path) + 1)]
    assert matches_end("/".join(pattern), "/".join(path)) == any(matches("/".join(pattern), end) for end in ends)


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("attn", "attn", True),
        ("attn", "layers/attn", False),
        ("*", "a", True),
        ("*", "a/b", False),
        ("*", "", False),
        ("***", "", False),
        ("{a,}", "", False),
        ("", "", False),
        ("**", "", True),
        ("**", "a/b/c", True),
        ("a/**", "a", True),
        ("a/**/c", "a/c", True),
        ("a/**/c", "a/x/y/c", True),
        ("**/c", "c", True),
        ("*_proj", "q_proj", True),
        ("w?", "w1", True),
        ("w?", "w", False),
        ("{q,k}_proj", "k_proj", True),
        ("{q,k}_proj", "v_proj", False),
        ("a.b", "axb", False),
        ("a+", "aa", False),
        ("{", "{", True),
        ("a}", "a}", True),
        ("[ab]", "a", False),
    ],
)
def test_a_glob(pattern, path, expected):
    assert matches(pattern, path) is expected


def test_prefixes_go_outwards():
    assert prefixes("a/b/c") == ["a/b/c", "a/b", "a", ""]
    assert prefixes("") == [""]
