"""The answers in the text of a conversation, and its tokens, each of which knows whether it is trained.

A template writes a conversation, and nothing in the text says which part of it the model is to learn. There are two sound ways to know.

Marks: the template says it itself, by `{% generation %}` around each answer (`render_marked`).

Prefixes: a generated answer follows the messages before it, written with the beginning of an answer; so that is where it begins in the
text. It ends where the text of the messages up to it ends:

    messages[:1], with a prompt     <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n
    messages[:2]                    <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nHi<|im_end|>\\n
    messages                        <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nHi<|im_end|>\\n<|im_start|>user ...

This holds only if each of these texts begins the whole one. Templates that rewrite earlier turns, such as those that drop thoughts, break
it. Then there is no mask, and the conversation is refused: the alternative, to train on everything, would go unnoticed.

The last token of an answer is the one at which generation stops. Without it a model would not learn to end, so an answer that prefixes
find has to have one. Blanks behind it belong to the next message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jgt.document import InputError

from ..tokenizer import Tokenizer
from .messages import Conversation
from .template import ChatTemplate, Spans

TRAINED, BEGIN, CUT, ENDLESS = 1 << 30, 1 << 29, 1 << 28, 1 << 27
"""Bits beside the id of a token: it is a target; a conversation begins with it, which is cut at its end, or has answers without an end."""
IDS = ENDLESS - 1
"""The bits of the id."""

_REMEDY = "Mark the answers in the template, {% generation %} .. {% endgeneration %} (docs/finetune.md), or set train_on to all"


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes conversations. is_whole: trains on every token, not on answers alone. most: the tokens of a row."""

    tokenizer: Tokenizer
    template: ChatTemplate
    is_whole: bool
    most: int

    def encode(self, conversation: Conversation) -> np.ndarray:
        """The tokens of a conversation, uint32 [n], at most `most`. Raises InputError without a sound mask, or with nothing to train."""
        messages, tools = conversation.messages, conversation.tools
        if tools and self.template.for_tools is not None:
            return replace(self, template=self.template.for_tools).encode(conversation)
        if not self.is_whole and all(message["role"] != "assistant" for message in messages[conversation.first :]):
            raise InputError(["has no answer, which is a message of the assistant. Remove the conversation"])
        if self.is_whole or not self.template.has_marks:
            text, spans = self.template.render(messages, tools, add_generation_prompt=False), Spans()
        else:
            text, spans = self._marked(conversation)
        ids, places = self.tokenizer.encode_spans(text)
        if self.is_whole:
            ranges = [(0, len(ids))]
        elif self.template.has_marks:
            ranges = [_tokens_of(places, span) for span in spans]
        else:
            ranges = [self._up_to_the_end(text, ids, places, span) for span in self._by_prefixes(conversation, text)]
        # The template's own marks are right by definition, but a model that is trained by these does not learn to end.
        is_endless = not self.is_whole and any(
            int(ids[last - 1]) not in self.tokenizer.special_ids for first, last in ranges if last > first
        )
        for first, last in ranges:
            ids[first:last] |= TRAINED
        return self._cut(ids, ENDLESS if is_endless else 0)

    def _cut(self, tokens: np.ndarray, bits: int) -> np.ndarray:
        """The tokens that a row has room for, the first one with some bits. Raises InputError if none of them is a target."""
        # Nothing predicts the first token.
        targets = np.flatnonzero(tokens[1:] & TRAINED)
        if not len(targets):
            raise InputError(["has no token to train on: its answers are empty"])
        if targets[0] + 1 >= self.most:
            why = (
                f"its first answer begins with token {targets[0] + 2:,}, and a row of model.seq {self.most - 1:,} has {self.most:,} tokens"
            )
            raise InputError([f"{why}. Shorten the conversation or remove it, or raise model.seq to {targets[0] + 1:,} or more"])
        tokens[0] = (tokens[0] & IDS) | BEGIN | bits | (CUT if len(tokens) > self.most else 0)
        return tokens[: self.most]

    def _marked(self, conversation: Conversation) -> tuple[str, Spans]:
        """The text of a conversation and its answers by the template's marks. Raises InputError."""
        messages, tools = conversation.messages, conversation.tools
        text, spans = self.template.render_marked(messages, tools)
        if conversation.first:
            spans = spans[len(self.template.render_marked(messages[: conversation.first], tools)[1]) :]
        if not any(first < last for first, last in spans):
            raise self._unsound("marks no text of it as an answer, although it has marks")
        answer = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
        if answer and any(first < last for first, last in self.template.render_marked(messages[:answer], tools)[1]):
            raise self._unsound("marks more than answers: also what comes before the first one")
        return text, spans

    def _by_prefixes(self, conversation: Conversation, text: str) -> Iterator[tuple[int, int]]:
        """The answers in the text of a conversation. Raises InputError."""
        messages, tools = conversation.messages, conversation.tools
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < conversation.first:
                continue
            before = self.template.render(messages[:number], tools)
            until = text
            if number + 1 < len(messages):
                until = self.template.render(messages[: number + 1], tools, add_generation_prompt=False)
            if not text.startswith(before) or not text.startswith(until):
                what = "the beginning of an answer" if text.startswith(until) else "this answer and what comes before it"
                raise self._unsound(f"writes {what} in another way in the whole conversation", number)
            if len(before) >= len(until):
                raise self._unsound("writes nothing for it", number)
            yield len(before), len(until)

    def _up_to_the_end(self, text: str, ids: np.ndarray, places: np.ndarray, span: tuple[int, int]) -> tuple[int, int]:
        """The tokens of an answer, up to the one that ends it. Raises InputError if there is none."""
        first, last = _tokens_of(places, span)
        ends = [n for n in range(first, last) if int(ids[n]) in self.tokenizer.special_ids]
        if not ends:
            raise self._unsound("ends an answer without a special token, so that the model would not learn to end it")
        if text[places[ends[-1], 1] : span[1]].strip():
            raise self._unsound("writes more text behind the token that ends an answer")
        return first, ends[-1] + 1

    def _unsound(self, why: str, number: int | None = None) -> InputError:
        place = "" if number is None else f"messages[{number}]: "
        return InputError([f"{place}the chat template {self.template.file} {why}, so nothing says which tokens to train. {_REMEDY}"])


def _tokens_of(places: np.ndarray, span: tuple[int, int]) -> tuple[int, int]:
    """The first token with a character of a part of the text, and the one behind the last. places: see `encode_spans`."""
    first = int(np.searchsorted(places[:, 1], span[0], side="right"))
    return first, max(first, int(np.searchsorted(places[:, 0], span[1], side="left")))
