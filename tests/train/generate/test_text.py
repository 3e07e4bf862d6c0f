"""Texts of tokens as they come, compared with the decoding of all tokens at once."""

import random

import pytest

from train.data.tokenizer import ByteTokenizer
from train.generate.text import Text

DECODE = ByteTokenizer().decode


def pieces(data, stop=()):
    """The text of bytes that come one after another, in pieces, as far as it is not stopped."""
    text, made = Text(DECODE, [10], stop), []
    for byte in data:
        made.append(text.add(byte))
        if text.is_stopped:
            break
    return [*made, text.end()], text.is_stopped


def test_a_character_comes_when_it_is_complete():
    made, _ = pieces("aß€😀".encode())
    assert made == ["a", "", "ß", "", "", "€", "", "", "", "😀", ""]


def test_half_a_character_at_the_end_is_a_replacement():
    assert pieces("a€".encode()[:-1])[0] == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize(
    ("data", "stop", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("xEN ENDy", ["END", "Z"], "xEN "),
        ("a€b", ["€"], "a"),
        ("never", ["END"], "never"),
        ("ababac", ["abac"], "ab"),
        ("no EN", ["END"], "no EN"),
        ("ab", ["", "b"], "a"),
    ],
)
def test_a_stop_text_ends_the_text_and_no_part_of_it_is_shown(data, stop, expected):
    made, is_stopped = pieces(data.encode(), stop)
    assert "".join(made) == expected
    assert is_stopped == (expected != data)


def test_pieces_are_the_text_of_any_bytes():
    draw = random.Random(0)
    for _ in range(200):
        data = bytes(draw.choice([65, 66, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80]) for _ in range(draw.randrange(20)))
        assert "".join(pieces(data)[0]) == data.decode("utf-8", "replace")
