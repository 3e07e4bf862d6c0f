"""Chat templates: programs in Jinja that write the messages of a chat as the text that a model was trained on.

A folder of Hugging Face has one beside its tokenizer. It comes from elsewhere, so it runs in Jinja's sandbox, with the functions that
transformers gives it, and its output is bounded:

    template = ChatTemplate.read(tokenizer.special.template, tokenizer.special.texts)
    text = template.render([{"role": "user", "content": "Hello"}])

A template may mark what a model is to learn in training: `{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}`. Such a
block becomes the call of a function, which writes its contents between two characters that no text has (`render_marked`).

Contents are texts. Some templates write nothing but lists of parts, and leave a text out without a word, so a template is tried.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from jgt.document import InputError, read_bytes

Message = Mapping[str, Any]
"""A message of a chat: its `role`, its `content`, and what else a template reads."""
Spans = list[tuple[int, int]]
"""Parts of a text: the characters that they begin at and end before."""

_MAX_BYTES, _MAX_TEXT = 1 << 25, 1 << 26
_MARK = re.compile(r"(\{%[-+]?\s*)(end)?generation(?=\s*[-+]?%\})")
_CALL = "generation_block"
_BESIDE, TOOL_TEMPLATE = ("chat_template", "tokenizer_config"), "additional_chat_templates/tool_use.jinja"
_PROBE = "A text of no chat"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Unicode has no characters there, and never will.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The chat template of a file. source: its program, which is compiled in `program`, and may have marks.

    texts: the texts of special tokens by the names that the template has for them. date: what the template takes for today; None: today.
    for_tools: another template, for chats with tools; None: this one.
    """

    file: Path
    source: str
    program: Any
    texts: Mapping[str, str]
    date: datetime | None = None
    for_tools: ChatTemplate | None = None

    @staticmethod
    def read(file: Path, texts: Mapping[str, str], date: datetime | None = None) -> ChatTemplate:
        """The template in a file: the key chat_template of a JSON file, or else the file itself. Raises InputError."""
        data = read_bytes(file, _MAX_BYTES)
        try:
            source = json.loads(data)["chat_template"] if file.suffix == ".json" else data.decode()
            named = {one["name"]: one["template"] for one in source} if isinstance(source, list) else {"default": source}
            if file.stem in _BESIDE and (beside := file.parent / TOOL_TEMPLATE).is_file():
                named["tool_use"] = read_bytes(beside, _MAX_BYTES).decode()
            if not isinstance(named["default"], str) or not isinstance(named.get("tool_use", ""), str):
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            why = "must be a template as text, or a list of templates of which one is named default"
            raise InputError([f"{file}: chat_template: {why}"]) from None
        # As transformers chooses among templates with names.
        tools = ChatTemplate.of(file, named["tool_use"], texts, date) if "tool_use" in named else None
        return replace(ChatTemplate.of(file, named["default"], texts, date), for_tools=tools)

    @staticmethod
    def of(file: Path, source: str, texts: Mapping[str, str], date: datetime | None = None) -> ChatTemplate:
        """The template with a program, which messages say is in a file. Raises InputError."""
        try:
            # An optional package that only chats need, and that every other start would wait for.
            import jinja2  # noqa: PLC0415
        except ImportError:
            raise InputError([f"{file}: a chat template needs the package jinja2. Run pip install 'jgt[chat]'"]) from None
        # The block `generation` marks answers for training. A block that calls has the same scope, and leaves the same blanks out.
        called = _MARK.sub(lambda mark: f"{mark[1]}endcall" if mark[2] else f"{mark[1]}call {_CALL}()", source)
        try:
            program = _environment().from_string(called)
        except jinja2.TemplateSyntaxError as error:
            raise InputError([f"{file}: chat_template: line {error.lineno}: {error.message}"]) from None
        except RecursionError:
            raise InputError([f"{file}: chat_template: is nested too deeply"]) from None
        return ChatTemplate(file=file, source=source, program=program, texts=texts, date=date)

    @property
    def has_marks(self) -> bool:
        """Whether the template says which parts of a text are answers. A comment says nothing."""
        return _MARK.search(re.sub(r"\{#.*?#\}", "", self.source, flags=re.DOTALL)) is not None

    @property
    def sha256(self) -> str:
        """A checksum of everything that the template writes texts from."""
        written = [self.source, self.for_tools and self.for_tools.source, dict(self.texts), str(self.date)]
        return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()

    def render(self, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool = True) -> str:
        """The text of messages. add_generation_prompt: the text ends where an answer begins. Raises InputError if the template refuses.

        tools: descriptions of functions that the model may call, for templates that write them.
        """
        return self._render(messages, tools, add_generation_prompt, _unmarked)

    @cached_property
    def prompt(self) -> str:
        """The text in front of an answer; empty if the template does not say it. Raises InputError if it cannot write a question alone."""
        question = [{"role": "user", "content": _PROBE}]
        before, after = (self.render(question, add_generation_prompt=prompts) for prompts in (False, True))
        return after.removeprefix(before) if after.startswith(before) else ""

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the template writes contents that are lists of parts, and none that are texts."""
        return self._writes(_parts(_PROBE)) and not self._writes(_PROBE)

    def _writes(self, content: Any) -> bool:
        chat = [{"role": role, "content": content} for role in ("user", "assistant")]
        with suppress(InputError):
            return self._written(chat, None, False, _unmarked).count(_PROBE) > 1
        return False

    def render_marked(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, Spans]:
        """The text of messages and the parts of it that the template marks as answers. Raises InputError."""
        text = self.render(messages, tools, add_generation_prompt=False)
        marked = self._render(messages, tools, False, lambda caller: f"{_OPEN}{caller()}{_CLOSE}")
        # What is outside of marks, inside, outside, and so on.
        parts = _MARKED.split(marked)
        if "".join(parts) != text or {_OPEN, _CLOSE} & {*text}:
            why = "its text is another one with the marks {% generation %}, or they are nested. Write what an answer is inside of one mark"
            raise InputError([f"{self.file}: the marks of the chat template say nothing about these messages: {why}"])
        ends = [*accumulate(map(len, parts))]
        return text, [(ends[n - 1], ends[n]) for n in range(1, len(parts), 2)]

    def _render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool, mark: Any) -> str:
        # As in transformers, a key without a value is a key that is not there.
        chat = [_with_thought({key: value for key, value in message.items() if value is not None}) for message in messages]
        if self._needs_parts:
            chat = [{**message, "content": _parts(message.get("content") or "")} for message in chat]
        return self._written(chat, tools, add_generation_prompt, mark)

    def _written(self, chat: Any, tools: Any, add_generation_prompt: bool, mark: Any) -> str:
        given = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt, _CALL: mark}
        day = datetime.now() if self.date is None else self.date
        pieces, size = list[str](), 0
        try:
            for piece in self.program.generate(**self.texts, **given, strftime_now=day.strftime):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_TEXT:
                    raise ValueError(f"its text is longer than {_MAX_TEXT:,} characters")
        # A template is a program, which may fail in any way.
        except Exception as error:
            raise InputError(
                [f"{self.file}: the chat template cannot write these messages: {error}. Change them, or the template"]
            ) from None
        return "".join(pieces)


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _with_thought(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose thought has all names that templates read, as in transformers."""
    thought = next((message[name] for name in _THOUGHTS if name in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _environment() -> Any:
    """The sandbox of templates, as transformers has it."""
    import jinja2.sandbox  # noqa: PLC0415

    extensions = ["jinja2.ext.loopcontrols"]
    made: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    # Jinja's own filter escapes characters of HTML.
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    made.globals["raise_exception"] = _refuse
    return made


def _unmarked(caller: Callable[[], str]) -> str:
    return caller()


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
