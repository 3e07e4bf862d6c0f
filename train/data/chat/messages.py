"""Conversations: the messages of a chat, and the functions that its model may call, in the shapes that data sets have them in.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}       OpenAI's
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}           ShareGPT's
    {"instruction": "Translate", "input": "Guten Tag", "output": "Good day"}                           Alpaca's

Preferences have two answers to one prompt, {"prompt": "Hello", "chosen": "Hi", "rejected": "What?"}, each of these a text or messages.

The keys of each row say which shape it has, so files of several shapes may be mixed. What a template would take without a word, and a model
would learn, is refused: a role with a typo, an answer without text, a message that has no content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgt.document import InputError, nearest, shown

from ..columns import read_rows
from ..config import SUFFIXES
from ..documents import read_objects
from ..packed import TextError

COLUMNS = ("messages", "conversations", "instruction", "input", "output", "system", "tools")
ANSWERS = ("chosen", "rejected")
ShapesOf = Callable[[Mapping[str, Any]], list[tuple[Any, int]]]
"""A row's messages, not checked, once or twice, and how many of them come before what is trained."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SENDERS = {"human": "user", "gpt": "assistant", "observation": "tool", **{role: role for role in ROLES}}
_SHAPES = "A conversation is one of {messages: [{role, content}, ..]}, {conversations: [{from, value}, ..]}, {instruction, input, output}"
_PREFERENCE = "A preference has a prompt, and two answers, chosen and rejected, each a text or a list of messages"
_EXAMPLE = '{"role": "user", "content": "Hello"}'
_DEFINITION = re.compile(r'^def ([a-z]\w+)\([^"]*?\)[^"\n]*:\n +r?"""(.+?)(?:"""|\n\n)', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages as a chat template reads them, and the descriptions of functions, or None. first: the first that may be trained."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    first: int = 0


Read = tuple[str, list[Conversation]]
"""The place of a row, and its conversation, or the chosen and the rejected one."""


def read_conversations(path: Path) -> Iterator[Read | TextError]:
    """The conversation of each line of a file of JSON lines, or of each row of a Parquet file."""
    return _read_all(path, COLUMNS, lambda row: [(_messages_of(row), 0)])


def read_preferences(path: Path) -> Iterator[Read | TextError]:
    """The conversations with the chosen and with the rejected answer of each line or row."""
    return _read_all(path, ("prompt", *ANSWERS, "tools"), _pair_of)


def _read_all(path: Path, columns: Collection[str], shapes_of: ShapesOf) -> Iterator[Read | TextError]:
    for row in read_rows(path, columns) if path.suffix in SUFFIXES["parquet"] else read_objects(path):
        yield row if isinstance(row, TextError) else _read(*row, shapes_of)


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


def _read(where: str, row: Mapping[str, Any], shapes_of: ShapesOf) -> Read | TextError:
    try:
        # JSON can spell half of a surrogate pair, "\ud800", which no tokenizer takes.
        json.dumps(row, ensure_ascii=False, default=str).encode("utf-8")
        tools, read = _tools(row.get("tools")), [(read_messages(messages), first) for messages, first in shapes_of(row)]
        problems = (
            problem for messages, _ in read for n, message in enumerate(messages) for problem in _problems(f"messages[{n}]", message)
        )
        # Two answers share the messages before them, and their problems.
        if found := list(dict.fromkeys(problems)):
            raise InputError(found)
        return where, [Conversation(messages=messages, tools=tools, first=first) for messages, first in read]
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
    more = ". Pairs of answers have the source preferences" if {*ANSWERS} <= row.keys() else ""
    raise InputError([f"has the keys {', '.join(map(shown, [*row][:12])) or 'none'}. {_SHAPES}{more}"])


def _pair_of(row: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """The messages with the chosen answer, and with the rejected one, and how many of them are the prompt. Raises InputError."""
    if not {*ANSWERS} <= row.keys():
        raise InputError([f"has the keys {', '.join(map(shown, [*row][:12])) or 'none'}. {_PREFERENCE}"])
    prompt, answers = row.get("prompt"), [_turns(row[key], "assistant") for key in ANSWERS]
    before = [] if prompt is None else _turns(prompt, "user")
    if not all(isinstance(turns, list) and turns for turns in (*answers, *([] if prompt is None else [before]))):
        raise InputError([f"prompt, chosen and rejected: must be texts or lists of messages. {_PREFERENCE}"])
    is_whole = [isinstance(turns[0], dict) and turns[0].get("role") != "assistant" for turns in answers]
    if all(is_whole):
        # Each answer is a conversation with the prompt in front.
        count = next((n for n, (one, other) in enumerate(zip(*answers, strict=False)) if one != other), min(map(len, answers)))
        before, answers = answers[0][:count], [turns[count:] for turns in answers]
    if not before or any(is_whole) != all(is_whole):
        raise InputError([f"chosen and rejected: have no prompt in common. {_PREFERENCE}"])
    if not all(answers) or answers[0] == answers[1]:
        raise InputError(["chosen and rejected: are the same, or one is the beginning of the other. Remove the row"])
    return [([*before, *turns], len(before)) for turns in answers]


def _turns(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


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


def read_questions(path: Path) -> Iterator[Read]:
    """A conversation about each documented function of a Python module, with its place: data that every machine has."""
    for name, said in _DEFINITION.findall(path.read_text(encoding="utf-8", errors="replace")):
        answer = " ".join(said.replace("\\", "").split())
        turns = {"user": f"What does {path.stem}.{name} do?", "assistant": answer}
        if answer:
            yield str(path), [Conversation(messages=[{"role": role, "content": text} for role, text in turns.items()])]


def read_better_answers(path: Path) -> Iterator[Read]:
    """As `read_questions`, with the answer as the chosen one, and as the rejected one the same answer in capital letters."""
    for where, (asked,) in read_questions(path):
        question, answer = asked.messages
        loud = {**answer, "content": answer["content"].upper()}
        if loud != answer:
            yield where, [Conversation(messages=[question, one], first=1) for one in (answer, loud)]
