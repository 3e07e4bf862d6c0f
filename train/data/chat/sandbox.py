"""The processes in which chat templates run: `python sandbox.py`, started by `template.py`. It imports jinja2 and nothing of jgt.

A template is a stranger's program. Jinja's sandbox keeps it from everything but its arguments, and has no limits of time and memory: a
product of two numbers may fill any machine. So this process limits its memory and forks another one, which answers. The system ends that
one when a template has used up its time, and the next one is there in a few milliseconds. Each line on stdin is a request, and has one line
as its answer: an object with the text, or with the reason why there is none.

Time is CPU time, so that a busy machine changes nothing. A template has some seconds for a start, and earns more with each request and the
length of its messages: a slow one cannot take a second for each of a million chats.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

_MEMORY = 1 << 30
"""The bytes of this process, at most."""
_FIRST, _AGAIN = 1.0, 0.05
"""Seconds that templates may take at first, and once one has taken too long: rows are many."""
_MOST, _EACH, _PER_BYTE = 2.0, 0.02, 1e-6
"""Seconds that a template can have saved, and that a request and a byte of it bring."""
_MAX_TEXT, _TEXTS = 1 << 20, 16
"""The characters that a template may add to a request, and how many times it may repeat it."""


def main() -> None:
    """Answers until stdin ends."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environment, left = _environment(), _FIRST
    while child := os.fork():
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        why = "it takes too long" if late else f"it needs too much memory (exit code {os.waitstatus_to_exitcode(status)})"
        # The next process knows no template.
        _say(json.dumps({"why": why, "is_new": True}).encode())
        left = _AGAIN
    _answer_all(environment, left)


def _answer_all(environment: jinja2.Environment, left: float) -> None:
    """Answers until stdin ends. left: the seconds that templates may take beside those that requests bring."""
    programs = dict[int, jinja2.Template]()
    # Requests come one at a time. No buffer holds one back that is for the next process.
    for line in sys.stdin.buffer:
        # Its signal ends the process, also within one long operation of Python's own.
        signal.setitimer(signal.ITIMER_PROF, min(_MOST, left + _EACH + _PER_BYTE * len(line)))
        answer = _answer(environment, programs, line)
        left = signal.setitimer(signal.ITIMER_PROF, 0)[0]
        _say(answer)


def _say(answer: bytes) -> None:
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()


def _answer(environment: jinja2.Environment, programs: dict[int, jinja2.Template], line: bytes) -> bytes:
    try:
        request = json.loads(line)
        if "source" in request:
            programs[request["program"]] = environment.from_string(request["source"])
            return b"{}"
        text = _text(programs[request["program"]], request, _MAX_TEXT + _TEXTS * len(line))
        return json.dumps({"text": text}).encode()
    # A template is a program, which may fail in any way.
    except Exception as error:
        return json.dumps({"why": _reason(error)[:10_000]}).encode()


def _reason(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    # Python compiles what Jinja writes, with its own limits of nested blocks.
    if isinstance(error, RecursionError | SyntaxError):
        return "is nested too deeply"
    return f"needs more than {_MEMORY:,} bytes" if isinstance(error, MemoryError) else str(error) or type(error).__name__


def _text(program: jinja2.Template, request: dict[str, Any], most: int) -> str:
    day = datetime.fromisoformat(request["day"])
    before, behind = request["marks"]
    given = {**request["given"], request["call"]: lambda caller: f"{before}{caller()}{behind}", "strftime_now": day.strftime}
    pieces, size = list[str](), 0
    for piece in program.generate(**given):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise ValueError(f"its text is longer than {most:,} characters")
    text = "".join(pieces)
    # Half of a surrogate pair is not a character, and raises UnicodeEncodeError.
    text.encode()
    return text


def _environment() -> jinja2.Environment:
    """The sandbox of templates, as transformers has it."""
    extensions = ["jinja2.ext.loopcontrols"]
    made: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    return made


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


if __name__ == "__main__":
    main()
