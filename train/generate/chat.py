"""Chats: messages become a prompt, by the chat template beside the tokenizer or as plain texts, and a person talks with a model.

chat = Chat.of(tokenizer)
prompt = chat.prompt([{"role": "user", "content": "Hello"}])
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jgt.document import InputError, shown

from ..data.template import ChatTemplate, Message
from ..data.tokenizer import Tokenizer, encoded_prompt
from .generate import Generator
from .text import terminal_text

# It gives `input` the keys of a shell, where the system has it.
with contextlib.suppress(ImportError):
    import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]

_EXAMPLE = '{"role": "user", "content": "Hello"}'


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How messages become a prompt. template: None: the texts of the messages follow one another, and the model continues them."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    @staticmethod
    def of(tokenizer: Tokenizer | None) -> Chat:
        """The chats of a tokenizer, with the template in its folder. Raises InputError."""
        if tokenizer is None:
            raise InputError(["the model has no tokenizer, so it cannot chat. Add a tokenizer.json to its folder"])
        special = tokenizer.special
        return Chat(tokenizer=tokenizer, template=special.template and ChatTemplate.read(special.template, special.texts))

    def prompt(self, messages: Any) -> list[int]:
        """The tokens of messages, after which the answer begins. Raises InputError if these are not messages."""
        read = _messages(messages)
        if self.template is None:
            return encoded_prompt(self.tokenizer, "".join(message.get("content") or "" for message in read))
        # A template writes the beginning of a text itself.
        return self.tokenizer.encode(self.template.render(read))

    def converse(self, generator: Generator, changes: Mapping[str, Any]) -> None:
        """Answers lines from the terminal until its end. Ctrl-C ends an answer. changes: keys of the section `generate:`.

        A prompt has at most half of the longest text, so that an answer has room. The model forgets earlier messages for it.
        """
        messages = list[Message]()
        while (line := _line()) is not None:
            # Without a template, a model may be asked to continue its own text.
            if not line.strip() and self.template is not None:
                continue
            messages.append({"role": "user", "content": line})
            text = ""
            try:
                prompt = self._newest(messages, generator.longest // 2)
                for piece in generator.pieces([prompt], **changes):
                    text += piece.text
                    print(terminal_text(piece.text), end="", flush=True)
            except KeyboardInterrupt:
                pass
            except InputError as error:
                print("\n".join(error.problems), file=sys.stderr)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": text})
            print()

    def _newest(self, messages: list[Message], limit: int) -> list[int]:
        """The prompt of the newest messages that have at most so many tokens. Earlier ones are removed from the list."""
        while len(prompt := self.prompt(messages)) > limit and len(messages) > 1:
            # A line and its answer.
            del messages[:2]
        return prompt if self.template is not None else prompt[-limit:]


def _line() -> str | None:
    """The next line from the terminal; None at its end."""
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends the chat)", file=sys.stderr)


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Messages whose contents are texts. Raises InputError with all problems."""
    if not isinstance(messages, list) or not messages:
        raise InputError([f"messages: must be a list of messages, such as {_EXAMPLE}"])
    problems, read = list[str](), list[dict[str, Any]]()
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            problems.append(f"messages[{number}]: must be a message with a role, such as {_EXAMPLE}, not {shown(message)}")
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if not isinstance(content, str | list | None) or not all(isinstance(text, str) for text in texts):
            problems.append(f"messages[{number}].content: must be a text or a list of parts with texts, not {shown(content)}")
        read.append({**message, "content": "\n".join(map(str, texts)) if parts else content})
    if problems:
        raise InputError(problems)
    return read
