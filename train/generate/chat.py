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

from jgt.document import InputError

from ..data.chat.keys import CHATS
from ..data.chat.messages import read_messages
from ..data.chat.source import template_of, training_template
from ..data.chat.template import ChatTemplate, Message
from ..data.config import DataConfig, OwnData
from ..data.tokenizer import TOKENIZER_REMEDY, Tokenizer, encoded_prompt
from .generate import Generator
from .text import terminal_text

# It gives `input` the keys of a shell, where the system has it.
with contextlib.suppress(ImportError):
    import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How messages become a prompt. template: None: the texts of the messages follow one another, and the model continues them."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    @staticmethod
    def of(tokenizer: Tokenizer | None, data: DataConfig | OwnData | None = None) -> Chat:
        """The chats of a tokenizer, with the template that a run's data has, or else the one in its folder. Raises InputError."""
        if tokenizer is None:
            raise InputError([f"the model has no tokenizer, so it cannot chat. {TOKENIZER_REMEDY}"])
        parts = data.parts() if isinstance(data, DataConfig) else ()
        trained = (training_template(part, tokenizer, date=None) for part in parts if part.source in CHATS)
        return Chat(tokenizer=tokenizer, template=next(trained, None) or template_of(tokenizer))

    def prompt(self, messages: object) -> list[int]:
        """The tokens of messages, after which the answer begins. Raises InputError if these are not messages."""
        read = read_messages(messages)
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
