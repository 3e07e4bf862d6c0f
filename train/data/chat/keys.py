"""The keys of conversations, and of pairs of them. Imports no JAX, numpy or Jinja, because they are checked before any of these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from jgt.document import LocalPath, path_problem

from ...settings.packages import is_installed

CHATS = ("chat", "preferences")
"""The sources whose rows are written with a chat template."""


def has_pairs(source: str) -> bool:
    """Whether a sample of this source is two rows: a chosen answer and a rejected one."""
    return source == "preferences"


@dataclass(frozen=True, kw_only=True)
class ChatKeys:
    """The keys of conversations, which a single source and a part of a mixture share.

    template: for `chat` and `preferences`: the file of the [chat template](finetune.md#the-template). auto: the one beside the tokenizer.
    train_on: for `chat`: assistant trains on answers alone, all on every token; see [what is trained](finetune.md#what-is-trained).
    packing: for `chat`: true: several whole conversations share a row, each as if it were alone. false: one conversation a row, and
    padding.
    """

    template: LocalPath = "auto"
    train_on: Literal["assistant", "all"] = "assistant"
    packing: bool = True

    def unread(self, source: str) -> Iterator[tuple[str, str]]:
        """Problems of keys that another source does not read."""
        for field in fields(ChatKeys):
            readers = CHATS if field.name == "template" else CHATS[:1]
            if source not in readers and getattr(self, field.name) != field.default:
                yield field.name, f"only the source {' and '.join(readers)} reads it, and source is {source}. Remove the key"

    def missing(self, source: str) -> Iterator[tuple[str, str]]:
        """Problems of what conversations need on this machine."""
        if source in CHATS and not is_installed("jinja2"):
            yield "source", f"{source} needs the package jinja2. Install it: pip install 'jgt[chat]'"
        if self.template != "auto" and (problem := path_problem(self.template)):
            yield "template", f"{self.template} cannot be read: {problem}. Write auto, or the path of a template in Jinja"
