"""Chat templates: programs in Jinja that write the messages of a chat as the text that a model was trained on.

A folder of Hugging Face has one beside its tokenizer. It comes from elsewhere, so it runs in a process of its own (`sandbox.py`), in
Jinja's sandbox, with the functions that transformers gives it, and its time, memory and output are bounded:

    template = ChatTemplate.read(tokenizer.special.template, tokenizer.special.texts)
    text = template.render([{"role": "user", "content": "Hello"}])

A template may mark what a model is to learn in training: `{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}`. Such a
block becomes the call of a function, which writes its contents between two characters that no text has (`render_marked`).

Contents are texts. Some templates write nothing but lists of parts, and leave a text out without a word, so a template is tried.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, cast

from jgt.document import InputError, read_bytes

from ...files.json_text import json_value

Message = Mapping[str, Any]
"""A message of a chat: its `role`, its `content`, and what else a template reads."""
Spans = list[tuple[int, int]]
"""Parts of a text: the characters that they begin at and end before."""

_MAX_BYTES = 1 << 25
_MARK = re.compile(r"(\{%[-+]?\s*)(end)?generation(?=\s*[-+]?%\})")
_BESIDE, TOOL_TEMPLATE = ("chat_template", "tokenizer_config"), "additional_chat_templates/tool_use.jinja"
_PROBE = "A text of no chat"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_CALL = "generation_block"
# Unicode has no characters there, and never will.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The chat template of a file. source: its program, which may have marks.

    texts: the texts of special tokens by the names that the template has for them. date: what the template takes for today; None: today.
    for_tools: another template, for chats with tools; None: this one.
    """

    file: Path
    source: str
    texts: Mapping[str, str]
    date: datetime | None = None
    for_tools: ChatTemplate | None = None

    @staticmethod
    def read(file: Path, texts: Mapping[str, str], date: datetime | None = None) -> ChatTemplate:
        """The template in a file: the key chat_template of a JSON file, or else the file itself. Raises InputError."""
        data = read_bytes(file, _MAX_BYTES)
        try:
            source = json_value(data)["chat_template"] if file.suffix == ".json" else data.decode()
            named = {one["name"]: one["template"] for one in source} if isinstance(source, list) else {"default": source}
            if file.stem in _BESIDE and (beside := file.parent / TOOL_TEMPLATE).is_file():
                named["tool_use"] = read_bytes(beside, _MAX_BYTES).decode()
            if not isinstance(named["default"], str) or not isinstance(named.get("tool_use", ""), str):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            why = "must be a template as text, or a list of templates of which one is named default"
            raise InputError([f"{file}: chat_template: {why}"]) from None
        # As transformers chooses among templates with names.
        tools = ChatTemplate.of(file, named["tool_use"], texts, date) if "tool_use" in named else None
        return replace(ChatTemplate.of(file, named["default"], texts, date), for_tools=tools)

    @staticmethod
    def of(file: Path, source: str, texts: Mapping[str, str], date: datetime | None = None) -> ChatTemplate:
        """The template with a program, which messages say is in a file. Raises InputError."""
        if importlib.util.find_spec("jinja2") is None:
            raise InputError([f"{file}: a chat template needs the package jinja2. Run pip install 'jgt[chat]'"])
        made = ChatTemplate(file=file, source=source, texts=texts, date=date)
        if "why" in (answer := _sandbox(os.getpid()).ask(made._called)):
            raise InputError([f"{file}: chat_template: {answer['why']}"])
        return made

    @functools.cached_property
    def _called(self) -> str:
        # The block `generation` marks answers for training. A block that calls has the same scope, and leaves the same blanks out.
        return _MARK.sub(lambda mark: f"{mark[1]}endcall" if mark[2] else f"{mark[1]}call {_CALL}()", self.source)

    @property
    def has_marks(self) -> bool:
        """Whether the template says which parts of a text are answers. A comment says nothing."""
        return _MARK.search(re.sub(r"\{#.*?#\}", "", self.source, flags=re.DOTALL)) is not None

    @property
    def sha256(self) -> str:
        """A checksum of everything that the template writes texts from."""
        written = [self.source, self.for_tools and self.for_tools.source, dict(self.texts), str(self.date)]
        return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()

    def render(self, messages: Sequence[Message], tools: object = None, *, add_generation_prompt: bool = True) -> str:
        """The text of messages. add_generation_prompt: the text ends where an answer begins. Raises InputError if the template refuses.

        tools: descriptions of functions that the model may call, for templates that write them.
        """
        return self._render(messages, tools, add_generation_prompt, "", "")

    @functools.cached_property
    def prompt(self) -> str:
        """The text in front of an answer; empty if the template does not say it. Raises InputError if it cannot write a question alone."""
        question = [{"role": "user", "content": _PROBE}]
        before, after = (self.render(question, add_generation_prompt=prompts) for prompts in (False, True))
        return after.removeprefix(before) if after.startswith(before) else ""

    @functools.cached_property
    def _needs_parts(self) -> bool:
        """Whether the template writes contents that are lists of parts, and none that are texts."""
        return self._writes(_parts(_PROBE)) and not self._writes(_PROBE)

    def _writes(self, content: object) -> bool:
        chat = [{"role": role, "content": content} for role in ("user", "assistant")]
        with contextlib.suppress(InputError):
            return self._written(chat, None, False, "", "").count(_PROBE) > 1
        return False

    def render_marked(self, messages: Sequence[Message], tools: object = None) -> tuple[str, Spans]:
        """The text of messages and the parts of it that the template marks as answers. Raises InputError."""
        text = self.render(messages, tools, add_generation_prompt=False)
        marked = self._render(messages, tools, False, _OPEN, _CLOSE)
        # What is outside of marks, inside, outside, and so on.
        parts = _MARKED.split(marked)
        if "".join(parts) != text or {_OPEN, _CLOSE} & {*text}:
            why = "its text is another one with the marks {% generation %}, or they are nested. Write what an answer is inside of one mark"
            raise InputError([f"{self.file}: the marks of the chat template say nothing about these messages: {why}"])
        ends = [*accumulate(map(len, parts))]
        return text, [(ends[n - 1], ends[n]) for n in range(1, len(parts), 2)]

    def _render(self, messages: Sequence[Message], tools: object, add_generation_prompt: bool, *marks: str) -> str:
        # As in transformers, a key without a value is a key that is not there.
        chat = [_with_thought({key: value for key, value in message.items() if value is not None}) for message in messages]
        if self._needs_parts:
            chat = [{**message, "content": _parts(message.get("content") or "")} for message in chat]
        return self._written(chat, tools, add_generation_prompt, *marks)

    def _written(self, chat: object, tools: object, add_generation_prompt: bool, *marks: str) -> str:
        given = {**self.texts, "messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        day = datetime.now() if self.date is None else self.date
        answer = _sandbox(os.getpid()).ask(self._called, {"given": given, "day": day.isoformat(), "call": _CALL, "marks": marks})
        if "text" not in answer:
            raise InputError([f"{self.file}: the chat template cannot write these messages: {answer['why']}. Change them, or the template"])
        return answer["text"]


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _with_thought(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose thought has all names that templates read, as in transformers."""
    thought = next((message[name] for name in _THOUGHTS if name in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


class _Sandbox:
    """The process in which all templates of this process run. It is started by the first one."""

    def __init__(self):
        self._process: subprocess.Popen[bytes] | None = None
        self._programs: dict[str, int] = {}
        # Requests are answered in several threads.
        self._lock = threading.Lock()

    def ask(self, source: str, request: Mapping[str, object] | None = None) -> Mapping[str, Any]:
        """The answer to a request about a template: its `text`, or `why` there is none. Without a request, it is only compiled."""
        with self._lock:
            if source not in self._programs:
                if "why" in (answer := self._answer({"program": len(self._programs), "source": source})):
                    return answer
                self._programs[source] = len(self._programs)
            return {} if request is None else self._answer({"program": self._programs[source], **request})

    def _answer(self, request: Mapping[str, object]) -> Mapping[str, Any]:
        try:
            asked = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            return {"why": str(error)}
        if self._process is None:
            # A session of its own: Ctrl-C lets a run finish its step, which may need a template.
            command, pipe = [sys.executable, "-P", str(Path(__file__).with_name("sandbox.py"))], subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)
        line, code = b"", None
        try:
            with contextlib.suppress(OSError):
                cast("IO[bytes]", self._process.stdin).write(asked)
                cast("IO[bytes]", self._process.stdin).flush()
                line = cast("IO[bytes]", self._process.stdout).readline()
        finally:
            # Also after Ctrl-C: its answer would be taken for that of the next request.
            if not line.endswith(b"\n"):
                code = self.end()
        if code is not None:
            return {"why": f"its process has ended (exit code {code})"}
        answer = json.loads(line)
        if "is_new" in answer:
            self._programs = {}
        return answer

    def end(self) -> int | None:
        """Ends the process and the one that it has forked. Returns its exit code; None if there is none."""
        process, self._process, self._programs = self._process, None, {}
        if process is not None:
            try:
                # Both end where stdin ends, unless a template runs.
                process.communicate(timeout=1)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return process and process.returncode


@functools.cache
def _sandbox(process: int) -> _Sandbox:
    """The sandbox of this process: one that is forked has its own."""
    made = _Sandbox()
    atexit.register(lambda: made.end() if os.getpid() == process else None)
    return made
