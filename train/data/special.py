"""The special tokens of a tokenizer, as the files beside its tokenizer.json name them in folders of Hugging Face.

A tokenizer.json has special tokens, but does not say what they are for. Two notions must not be mixed up. `end_of_text` is the token
between documents in training. `ends` are the tokens at which generation stops: a model that was trained on chats ends its turn with a token
that no document ends with, and may name it as its end of sequence.

    folder         end of sequence by its files              end_of_text          ends
    Qwen2.5        <|endoftext|>                             <|endoftext|>        <|endoftext|> <|im_end|>
    Qwen2.5 chat   <|im_end|>; both for generation           <|endoftext|>        <|endoftext|> <|im_end|>
    Llama 3 chat   <|eot_id|>; three for generation          <|end_of_text|>      <|end_of_text|> <|eom_id|> <|eot_id|>
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jgt.document import InputError, read_bytes, shown

from ..files.json_text import json_value

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""The names that the end-of-text token may have where no file says it."""
WAYS_TO_NAME_AN_END = f"Known names: {', '.join(END_OF_TEXT_NAMES)}. A tokenizer_config.json beside it may name another one (eos_token)"
END_OF_TURN_NAMES = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
"""Tokens that end a turn of a chat. They never end a document."""
_MAX_BYTES = 1 << 25
_CONFIG, _NAMES, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERATION = ("generation_config.json", "config.json")
"""The files that name the ends of a generated text by their ids. The first one that does counts."""


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    beginning: the tokens in front of every text. first: the token that the files name as the first one of a text, also where no text gets
    it; None if there is none. end_of_text: the token that ends a document; None if it has none. ends: the tokens at
    which generation stops. pad: the token of padding, if it has one. template: the file with its chat template, if it has one. texts: the
    texts of tokens by the names that a template has for them, such as bos_token.
    """

    beginning: tuple[int, ...] = ()
    first: int | None = None
    end_of_text: int | None = None
    ends: tuple[int, ...] = ()
    pad: int | None = None
    template: Path | None = None
    texts: Mapping[str, str] = field(default_factory=dict[str, str])


def special_tokens(folder: Path, id_of: Callable[[str], int | None], beginning: tuple[int, ...]) -> SpecialTokens:
    """The special tokens by the files of a folder, none of which has to be there. Raises InputError.

    id_of: the id of a token by its text. beginning: the tokens that the tokenizer.json adds in front of a text. Like transformers, this
    reads no add_bos_token, which says how a tokenizer without a tokenizer.json is made.
    """
    config = _config(folder)
    texts = _named(config, folder)

    first, eos, pad = (id_of(texts[key]) if key in texts else None for key in ("bos_token", "eos_token", "pad_token"))
    end = _end_of_text(config.get("eos_token"), folder, id_of)
    named_ends = (eos, end, *map(id_of, END_OF_TURN_NAMES))
    ends = {token for token in named_ends if token is not None} | set(declared_ends(folder))
    files = [folder / name for name in _TEMPLATES] + ([folder / _CONFIG] if config.get("chat_template") is not None else [])
    template = next((file for file in files if file.is_file()), None)
    ids = tuple(sorted(ends))
    return SpecialTokens(beginning=beginning, first=first, end_of_text=end, ends=ids, pad=pad, template=template, texts=texts)


def declared_tokens(folder: Path, id_of: Callable[[str], int | None]) -> Iterator[tuple[int | None, Mapping[str, object], bool]]:
    """The tokens that files beside a tokenizer.json name, in the order in which transformers adds those that it lacks.

    Each has its id, if they say it, its properties, and whether these go before those in tokenizer.json. id_of: the id of a token, also
    of one that was added meanwhile. Raises InputError.
    """
    config = _config(folder)
    names, decoder = _named(config, folder).values(), config.get("added_tokens_decoder")
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    further = {_text(one, folder, "extra_special_tokens"): one for one in (further if isinstance(further, list) else [])}
    for number, shape in sorted((int(number), shape) for number, shape in (decoder or {}).items()):
        yield number, {**shape, "special": shape.get("special", False) or shape["content"] in names}, True
    for text, number in {} if decoder is not None else _read(folder / _ADDED).items():
        is_special = text in names or text in further
        yield number, {"content": text, "special": is_special, "normalized": not is_special}, False
    # A name alone is not a token.
    for text, shape in {**{name: name for name in names if id_of(name) is not None}, **further}.items():
        yield None, {**(shape if isinstance(shape, Mapping) else {"content": text}), "special": True}, False


def declared_ends(folder: Path) -> tuple[int, ...]:
    """The ends of a generated text that a folder of Hugging Face names by their ids: one or several. Raises InputError."""
    for name in _GENERATION:
        value = _read(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise InputError([f"{folder / name}: eos_token_id: must be the id of a token or a list of ids, not {shown(value)}"])
        if ids:
            return tuple(ids)
    return ()


def _end_of_text(eos: object, folder: Path, id_of: Callable[[str], int | None]) -> int | None:
    """The token that ends a document: a known name, that of the files first; or else what the files name, unless it ends a turn."""
    name = _text(eos, folder, "eos_token")
    known = sorted(END_OF_TEXT_NAMES, key=lambda one: one != name)
    others = [] if name is None or name in END_OF_TURN_NAMES else [name]
    return next((token for one in (*known, *others) if (token := id_of(one)) is not None), None)


def _config(folder: Path) -> Mapping[str, Any]:
    """The keys about tokens in the files beside a tokenizer.json. Raises InputError."""
    config = _read(folder / _CONFIG)
    # Newer files have all properties of their tokens.
    return config if "added_tokens_decoder" in config else {**config, **_read(folder / _NAMES)}


def _named(config: Mapping[str, object], folder: Path) -> dict[str, str]:
    """The texts of tokens by their names. Raises InputError."""
    further = config.get("extra_special_tokens")
    # As in transformers: a model may have tokens of its own, such as image_token.
    named = {key: value for key, value in config.items() if key in _NAMED or (key.endswith("_token") and isinstance(value, str))}
    named |= further if isinstance(further, Mapping) else {}
    return {key: text for key, value in named.items() if (text := _text(value, folder, key)) is not None}


def _text(value: object, folder: Path, key: str) -> str | None:
    """A token's text, which may stand in a mapping with its properties."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is None or isinstance(text, str):
        return text
    raise InputError([f"{folder / _CONFIG}: {key}: must be the text of a token, not {shown(value)}"])


def _read(file: Path) -> Mapping[str, Any]:
    """The contents of a JSON file; empty if there is none. Raises InputError."""
    if not file.is_file():
        return {}
    try:
        contents = json_value(read_bytes(file, _MAX_BYTES))
    except ValueError as error:
        raise InputError([f"{file}: is not JSON: {error}"]) from None
    if not isinstance(contents, dict):
        raise InputError([f"{file}: must be a mapping of keys to values"])
    return contents
