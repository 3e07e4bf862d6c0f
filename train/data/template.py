"""Chat templates: programs in Jinja that write the messages of a chat as the text that a model was trained on.

A folder of Hugging Face has one beside its tokenizer. It comes from elsewhere, so it runs in Jinja's sandbox, with the functions that
transformers gives it, and its output is bounded:

    template = ChatTemplate.read(tokenizer.special.template, tokenizer.special.texts)
    text = template.render([{"role": "user", "content": "Hello"}])
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jgt.document import InputError, read_bytes

try:
    import jinja2
    import jinja2.sandbox
except ImportError:
    jinja2 = None

Message = Mapping[str, Any]
"""A message of a chat: its `role`, its `content`, and what else a template reads."""

_MAX_BYTES, _MAX_TEXT = 1 << 25, 1 << 26


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The chat template of a file. program: compiled. texts: the texts of special tokens by the names that the template has for them."""

    file: Path
    program: Any
    texts: Mapping[str, str]

    @staticmethod
    def read(file: Path, texts: Mapping[str, str]) -> ChatTemplate:
        """The template in a file: chat_template.jinja, or the key chat_template of a JSON file. Raises InputError."""
        if jinja2 is None:
            raise InputError([f"{file}: a chat template needs the package jinja2. Run pip install 'jgt[chat]'"])
        data = read_bytes(file, _MAX_BYTES)
        try:
            source = data.decode() if file.suffix == ".jinja" else json.loads(data)["chat_template"]
            if isinstance(source, list):
                source = next(one["template"] for one in source if one["name"] == "default")
            # The block `generation` marks answers for training. As `with`, it is a scope of its own and changes no text.
            source = re.sub(r"(\{%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%\})", r"\1with", source)
            return ChatTemplate(file=file, program=_environment().from_string(source), texts=texts)
        except jinja2.TemplateSyntaxError as error:
            raise InputError([f"{file}: chat_template: line {error.lineno}: {error.message}"]) from None
        except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError):
            why = "must be a template as text, or a list of templates of which one is named default"
            raise InputError([f"{file}: chat_template: {why}"]) from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of messages. add_generation_prompt: the text ends where an answer begins. Raises InputError if the template refuses."""
        # As in transformers, a key without a value is a key that is not there.
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        given = {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        pieces, size = list[str](), 0
        try:
            for piece in self.program.generate(**self.texts, **given):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_TEXT:
                    raise ValueError(f"its text is longer than {_MAX_TEXT:,} characters")
        # A template is a program, which may fail in any way.
        except Exception as error:
            raise InputError([f"{self.file}: the chat template cannot write these messages: {error}"]) from None
        return "".join(pieces)


def _environment() -> Any:
    """The sandbox of templates, as transformers has it."""
    assert jinja2 is not None
    extensions = ["jinja2.ext.loopcontrols"]
    made: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": lambda format: datetime.now().strftime(format)}
    return made


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
