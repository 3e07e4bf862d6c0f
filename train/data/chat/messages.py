"""Conversations: the messages of a chat, and the functions that its model may call, in the shapes that data sets have them in.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}       OpenAI's
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}           ShareGPT's
    {"instruction": "Translate", "input": "Guten Tag", "output": "Good day"}                           Alpaca's

The keys of each row say which shape it has, so files of several shapes may be mixed. What a template would take without a word, and a model
would learn, is refused: a role with a typo, an answer without text, a message that has no content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgt.document import InputError, nearest, shown

from ..columns import read_rows
from ..config import SUFFIXES
from ..documents import read_objects
from ..packed import TextError

COLUMNS = ("messages", "conversations", "instruction", "input", "output", "system", "tools")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SENDERS = {"human": "user", "gpt": "assistant", "observation": "tool", **{role: role for role in ROLES}}
_SHAPES = "A conversation is one of {messages: [{role, content}, ..]}, {conversations: [{from, value}, ..]}, {instruction, input, output}"
_EXAMPLE = '{"role": "user", "content": "Hello"}'
_DEFINITION = re.compile(r'^def ([a-z]\w+)\([^"]*?\)[^"\n]*:\n +r?"""(.+?)(?:"""|\n\n)', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages as a chat template reads them, and the descriptions of functions, or None."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


def read_conversations(path: Path) -> Iterator[tuple[str, Conversation] | TextError]:
    """The place and the conversation of each line of a file of JSON lines, or of each row of a Parquet file."""
    for row in read_rows(path, COLUMNS) if path.suffix in SUFFIXES["parquet"] else read_objects(path):
        yield row if isinstance(row, TextError) else _read(*row)


def read_messages(messages: Any) -> list[dict[str, Any]]:
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


def _read(where: str, row: Mapping[str, Any]) -> tuple[str, Conversation] | TextError:
    try:
        # JSON can spell half of a surrogate pair, "\ud800", which no tokenizer takes.
        json.dumps(row, ensure_ascii=False, default=str).encode("utf-8")
        messages = read_messages(_messages_of(row))
        if problems := [problem for number, message in enumerate(messages) for problem in _problems(f"messages[{number}]", message)]:
            raise InputError(problems)
        return where, Conversation(messages=messages, tools=_tools(row.get("tools")))
    except UnicodeEncodeError:
        return TextError(f"{where}: contains half of a surrogate pair, which is not a character")
    except InputError as error:
        return TextError("\n".join(f"{where}: {problem}" for problem in error.problems))


def _messages_of(row: Mapping[str, Any]) -> Any:
    """The messages of a row of any shape, not checked. Raises InputError."""
    if "messages" in row:
        return row["messages"]
    before = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if "conversations" in row:
        turns = row["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise InputError([f"conversations: must be a list of {{from, value}}, not {shown(turns)}"])
        # Some files have the keys of OpenAI under this name.
        senders = [turn.get("from", turn.get("role")) for turn in turns]
        if unknown := [(n, sender) for n, sender in enumerate(senders) if not isinstance(sender, str) or sender not in _SENDERS]:
            raise InputError([f"conversations[{n}].from: {shown(one)} is not known. {nearest(str(one), _SENDERS)}" for n, one in unknown])
        return [
            *before,
            *(
                {"role": _SENDERS[sender], "content": turn.get("value", turn.get("content"))}
                for sender, turn in zip(senders, turns, strict=True)
            ),
        ]
    if {"instruction", "output"} <= row.keys():
        parts = [row["instruction"], *([row["input"]] if row.get("input") else [])]
        if not all(isinstance(part, str) for part in parts):
            raise InputError(["instruction and input: must be texts"])
        return [*before, {"role": "user", "content": "\n\n".join(parts)}, {"role": "assistant", "content": row["output"]}]
    raise InputError([f"has the keys {', '.join(map(shown, [*row][:12])) or 'none'}. {_SHAPES}"])


def _problems(where: str, message: Mapping[str, Any]) -> Iterator[str]:
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        yield f"{where}.role: {shown(role)} is not known. {nearest(role, ROLES)}"
    elif not (content or "").strip() and role in ("user", "assistant") and not message.get("tool_calls"):
        yield f"{where}.content: is empty. Give the message a text, or remove the conversation"
    if message.get("weight", 1) != 1:
        yield f"{where}.weight: {shown(message['weight'])} is not supported: all answers of a conversation are trained. Remove the key"


def _tools(value: Any) -> list[Any] | None:
    """The descriptions of functions, which columns have as JSON. Raises InputError."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        tools = value
    if not isinstance(tools, list | None):
        raise InputError([f"tools: must be a list of functions, or its JSON, not {shown(value)}"])
    return tools or None


def read_questions(path: Path) -> Iterator[tuple[str, Conversation]]:
    """A conversation about each documented function of a Python module, with its place: data that every machine has."""
    for name, said in _DEFINITION.findall(path.read_text(encoding="utf-8", errors="replace")):
        answer = " ".join(said.replace("\\", "").split())
        turns = {"user": f"What does {path.stem}.{name} do?", "assistant": answer}
        if answer:
            yield str(path), Conversation(messages=[{"role": role, "content": text} for role, text in turns.items()])
