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

from jgt.document import InputError, shown

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
        text, spans = self._answers(conversation)
        self._check_written(conversation, "".join(text[begin:end] for begin, end in spans))
        ids, places = self.tokenizer.encode_spans(text)
        found = [] if self.is_whole else [self._found(text, ids, places, span) for span in spans]
        problems = [why for _, _, why in found if why]
        if problems and not self.template.has_marks:
            raise self._unsound(problems[0])
        for first, last, _ in [(0, len(ids), "")] if self.is_whole else found:
            ids[first:last] |= TRAINED
        # The template's own marks are right by definition, but a model that is trained by these may not learn to end.
        return self._cut(ids, ENDLESS if problems else 0)

    def _answers(self, conversation: Conversation) -> tuple[str, Spans]:
        """The text of a conversation, and what is trained of it. Raises InputError."""
        if self.template.has_marks and not self.is_whole:
            return self._marked(conversation)
        text = self.template.render(conversation.messages, conversation.tools, add_generation_prompt=False)
        return text, [(0, len(text))] if self.is_whole else [*self._by_prefixes(conversation, text)]

    def _check_written(self, conversation: Conversation, written: str) -> None:
        """Raises InputError for an answer without its text: at least the end, behind thoughts. Beside calls, templates may leave it out."""
        for number, message in enumerate(conversation.messages[conversation.first :], conversation.first):
            line = (message.get("content") or "").strip().rpartition("\n")[2].strip()
            if message["role"] == "assistant" and not message.get("tool_calls") and line not in written:
                why = f"the chat template {self.template.file} writes another text than {shown(line)}"
                raise InputError([f"messages[{number}]: {why}. Change the message, or the template"])

    def _cut(self, tokens: np.ndarray, bits: int) -> np.ndarray:
        """The tokens that a row has room for, the first one with some bits. Raises InputError if none of them is a target."""
        # Nothing predicts the first token.
        targets = np.flatnonzero(tokens[1:] & TRAINED)
        if not len(targets):
            raise InputError(["has no token to train on: its answers are empty"])
        if targets[0] + 1 >= self.most:
            where = f"token {targets[0] + 2:,}, and a row of model.seq {self.most - 1:,} has {self.most:,} tokens"
            remedy = f"Shorten the conversation or remove it, or raise model.seq to {targets[0] + 1:,} or more"
            raise InputError([f"its first answer begins with {where}. {remedy}"])
        tokens[0] = (tokens[0] & IDS) | BEGIN | bits | (CUT if len(tokens) > self.most else 0)
        return tokens[: self.most]

    def _marked(self, conversation: Conversation) -> tuple[str, Spans]:
        """The text of a conversation and its answers by the template's marks. Raises InputError."""
        messages, tools = conversation.messages, conversation.tools
        text, spans = self.template.render_marked(messages, tools)
        if conversation.first:
            spans = spans[len(self.template.render_marked(messages[: conversation.first], tools)[1]) :]
        if not (spans := [span for span in spans if span[0] < span[1]]):
            raise self._unsound("marks no text of it as an answer, although it has marks")
        answer = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
        # Some cannot write what comes before the first question.
        with InputError.collect([]):
            before = self.template.render_marked(messages[:answer], tools)[1] if answer else []
            spans = spans if not any(first < last for first, last in before) else []
        if not spans:
            raise self._unsound("marks more than answers: also what comes before the first one")
        return text, spans

    def _by_prefixes(self, conversation: Conversation, text: str) -> Iterator[tuple[int, int]]:
        """The answers in the text of a conversation. Raises InputError."""
        messages, tools = conversation.messages, conversation.tools
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < conversation.first:
                continue
            until = text
            if number + 1 < len(messages):
                until = self.template.render(messages[: number + 1], tools, add_generation_prompt=False)
            before = self._before(conversation, number, until)
            if not text.startswith(before) or not text.startswith(until):
                what = "the beginning of an answer" if text.startswith(until) else "this answer and what comes before it"
                raise self._unsound(f"writes {what} in another way in the whole conversation", number)
            yield len(before), len(until)

    def _before(self, conversation: Conversation, number: int, until: str) -> str:
        """The text in front of an answer. until: that up to its end. Raises InputError."""
        before = conversation.messages[:number]
        # Many templates cannot write what comes before the first question. There, an answer that is alone begins behind the prompt.
        if all(message["role"] != "user" for message in before) and until.count(prompt := self.template.prompt or until) == 1:
            return until[: until.index(prompt) + len(prompt)]
        return self.template.render(before, conversation.tools)

    def _found(self, text: str, ids: np.ndarray, places: np.ndarray, span: tuple[int, int]) -> tuple[int, int, str]:
        """The first token of an answer, the one behind those that are trained, and why there is none that ends it."""
        first, last = _tokens_of(places, span)
        end = max((n + 1 for n in range(first, last) if int(ids[n]) in self.tokenizer.special_ids), default=first)
        if end == first:
            return first, last, "ends an answer without a special token, so that the model would not learn to end it"
        is_last = not text[places[end - 1, 1] : span[1]].strip()
        return first, last if self.template.has_marks else end, "" if is_last else "writes more text behind the token that ends an answer"

    def _unsound(self, why: str, number: int | None = None) -> InputError:
        place = "" if number is None else f"messages[{number}]: "
        return InputError([f"{place}the chat template {self.template.file} {why}, so nothing says which tokens to train. {_REMEDY}"])


def _tokens_of(places: np.ndarray, span: tuple[int, int]) -> tuple[int, int]:
    """The first token with a character of a part of the text, and the one behind the last. places: see `encode_spans`."""
    first = int(np.searchsorted(places[:, 1], span[0], side="right"))
    return first, max(first, int(np.searchsorted(places[:, 0], span[1], side="left")))
