"""Conversations: the messages of a chat, and the functions that its model may call, in the shapes that data sets have them in.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}       OpenAI's
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}           ShareGPT's
    {"instruction": "Translate", "input": "Guten Tag", "output": "Good day"}                           Alpaca's

Preferences have two answers to one prompt, {"prompt": "Hello", "chosen": "Hi", "rejected": "What?"}, each of these a text or messages.

The keys of each row say which shape it has, so files of several shapes may be mixed. A null is a key that a row does not have, as in a
table, and so is a key of a row with nothing in it. All other keys of a message go to the template. What a template would take without a
word, and a model would learn, is refused: a role with a typo, an answer without text, a mark that an answer is not to be trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jgt.document import InputError, nearest, shown

from ...files.json_text import NestedError, json_value
from ..columns import read_rows, without_nulls
from ..config import SUFFIXES
from ..documents import read_objects
from ..packed import TextError

ANSWERS = ("chosen", "rejected")
_UNREAD = ("history", "functions", "loss_mask", "images", "videos", "audios", "chat_template_kwargs")
"""Keys of a row that other trainers read, and that change what is trained."""
COLUMNS = ("messages", "conversations", "instruction", "input", "output", "system", "tools", "prompt", *ANSWERS, *_UNREAD)
_Kind = TypeVar("_Kind", list, dict)
Turns = list[dict[str, Any]]
ShapesOf = Callable[[Mapping[str, object]], list[tuple[Turns, int]]]
"""The messages of a row, once or twice, and how many of them come before what is trained."""
_SPEAKERS = (
    {"system": "system"} | dict.fromkeys(("instruction", "input", "prompt"), "user") | dict.fromkeys(("output", *ANSWERS), "assistant")
)
"""Keys of a row that may be a text, and its role."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SENDERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
_NAMES = {"from": "role", "value": "content"}
_MARKS = ("weight", "loss_scale", "train", "training", "trainable", "loss", "loss_mask")
"""Keys of a message that say whether it is trained, in the files of other trainers."""
_SHAPES = "A conversation is one of {messages: [{role, content}, ..]}, {conversations: [{from, value}, ..]}, {instruction, input, output}"
_PREFERENCE = "A preference has a prompt, and two answers, chosen and rejected, each a text or a list of messages"
_EXAMPLE = '{"role": "user", "content": "Hello"}'
_DEFINITION = re.compile(r'^def ([a-z]\w+)\([^"]*?\)[^"\n]*:\n +r?"""(.+?)(?:"""|\n\n)', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages as a chat template reads them, and the descriptions of functions, or None. first: the first that may be trained."""

    messages: Turns
    tools: list[object] | None = None
    first: int = 0


Read = tuple[str, list[Conversation]]
"""The place of a row, and its conversation, or the chosen and the rejected one."""


def read_conversations(path: Path) -> Iterator[Read | TextError]:
    """The conversation of each line of a file of JSON lines, or of each row of a Parquet file."""
    return _read_all(path, _chat_of)


def read_preferences(path: Path) -> Iterator[Read | TextError]:
    """The conversations with the chosen and with the rejected answer of each line or row."""
    return _read_all(path, _pair_of)


def _read_all(path: Path, shapes_of: ShapesOf) -> Iterator[Read | TextError]:
    for row in read_rows(path, COLUMNS) if path.suffix in SUFFIXES["parquet"] else read_objects(path):
        yield row if isinstance(row, TextError) else _read(*row, shapes_of)


def read_messages(value: object, key: str = "messages", *, trains: bool = False) -> Turns:
    """Messages as templates read them. trains: those that would teach nothing, or not what they say, are problems. Raises InputError."""
    if not isinstance(value, list) or not value:
        raise InputError([f"{key}: must be a list of messages, such as {_EXAMPLE}"])
    problems, read = list[str](), Turns()
    for number, turn in enumerate(value):
        with InputError.collect(problems):
            read.append(_message(f"{key}[{number}]", turn, trains))
    if problems:
        raise InputError(problems)
    return read


def _message(where: str, turn: Any, trains: bool) -> dict[str, object]:
    """A message by OpenAI's names. Raises InputError."""
    message: dict[str, object] = {_NAMES.get(str(key), str(key)): value for key, value in turn.items()} if isinstance(turn, dict) else {}
    if "role" not in message or len(message) < len(turn):
        raise InputError([f"{where}: must be a message with a role, such as {_EXAMPLE}, not {shown(turn)}"])
    role = message["role"] = _SENDERS.get(str(message["role"]), message["role"])
    if role not in ROLES:
        key = "from" if "from" in turn else "role"
        raise InputError([f"{where}.{key}: {shown(role)} is not known. {nearest(str(role), [*ROLES, *_SENDERS])}"])
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None for part in parts]
    if not isinstance(content, str | list | None) or not all(isinstance(text, str) for text in texts):
        raise InputError([f"{where}.content: must be a text or a list of parts with texts, not {shown(content)}"])
    text = message["content"] = "\n".join(map(str, texts)) if isinstance(content, list) else content
    if message.get("tool_calls"):
        message["tool_calls"] = _functions(f"{where}.tool_calls", message["tool_calls"], "arguments")
    if trains and role in ("user", "assistant") and not (text or "").strip() and not message.get("tool_calls"):
        raise InputError([f"{where}.content: is empty. Give the message a text, or remove the conversation"])
    # Most files with weights have a 1 everywhere.
    marks = [key for key in _MARKS if (message.get(key, 1) != 1 if role == "assistant" else message.get(key) is True)]
    if trains and marks:
        why = "is not supported: all answers of a conversation are trained, and nothing else. Remove the key"
        raise InputError([f"{where}.{key}: {shown(message[key])} {why}" for key in marks])
    return message


def _functions(where: str, value: object, key: str) -> list[object]:
    """Functions, or calls of them, of which any part may be JSON as a text. key: what describes one. Raises InputError."""
    made = list[object]()
    for number, one in enumerate(_decoded(where, value, list)):
        place = f"{where}[{number}]"
        whole = _decoded(place, one, dict)
        inner = _decoded(f"{place}.function", whole.get("function", whole), dict)
        if key in inner:
            inner = {**inner, key: _decoded(f"{place}.function.{key}", inner[key], dict)}
        made.append({**whole, "function": inner} if "function" in whole else inner)
    return made


def _decoded(where: str, value: object, kind: type[_Kind]) -> _Kind:
    """A list or a mapping that may be JSON as a text; a blank one has nothing in it. Raises InputError."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            found = json_value(value.strip() or "null")
            json.dumps(found, ensure_ascii=False).encode("utf-8")
            value = kind() if found is None else found
    if not isinstance(value, kind):
        raise InputError([f"{where}: must be a {'list' if kind is list else 'mapping'}, or its JSON, not {shown(value)}"])
    return value


def _read(where: str, row: Mapping[str, object], shapes_of: ShapesOf) -> Read | TextError:
    try:
        text = json.dumps(row, ensure_ascii=False)
        # JSON can spell half of a surrogate pair, "\ud800", which no tokenizer takes.
        text.encode("utf-8")
        stated = json_value(text, without_nulls).items()
        said = {key: value for key, value in stated if (value.strip() if isinstance(value, str) else value) not in ("", [], {})}
        if unread := [f"{key}: is not supported. Write it as messages or tools, or remove the row" for key in _UNREAD if key in said]:
            raise InputError(unread)
        tools = _functions("tools", said.get("tools", []), "parameters") or None
        return where, [Conversation(messages=turns, tools=tools, first=first) for turns, first in shapes_of(said)]
    except (UnicodeEncodeError, NestedError, RecursionError):
        return TextError(f"{where}: contains half of a surrogate pair, which is not a character, or is nested too deeply")
    except InputError as error:
        return TextError("\n".join(f"{where}: {problem}" for problem in error.problems))


def _chat_of(said: Mapping[str, object]) -> list[tuple[Turns, int]]:
    """The messages of a conversation of any shape. Raises InputError."""
    found = {key: turns for key in ("messages", "conversations") if (turns := _turns(said, key))}
    if {"instruction", "output"} <= said.keys():
        question, *more = (_turns(said, key)[-1] for key in ("instruction", "input") if key in said)
        text = "\n\n".join(turn["content"] for turn in (question, *more))
        found["instruction"] = [{**question, "content": text}, *_turns(said, "output")]
    if not found:
        more = ". Pairs of answers have the source preferences" if {*ANSWERS} <= said.keys() else ""
        raise InputError([f"{_keys_of(said)}. {_SHAPES}{more}"])
    turns, *others = found.values()
    if any(other != turns for other in others):
        raise InputError([f"{' and '.join(found)}: are different conversations. Keep one of them"])
    return [(_with_system(said, turns), 0)]


def _turns(said: Mapping[str, object], key: str) -> Turns:
    """The messages of a key, which may be one message or its text; none without the key. Raises InputError."""
    value = said.get(key)
    if isinstance(value, str) and key in _SPEAKERS:
        value = {"role": _SPEAKERS[key], "content": value}
    return [] if value is None else read_messages([value] if isinstance(value, dict) else value, key, trains=True)


def _with_system(said: Mapping[str, object], turns: Turns) -> Turns:
    """Messages with the system message of their row in front. Raises InputError."""
    system = _turns(said, "system")
    if system and turns[0]["role"] == "system" and turns[:1] != system:
        raise InputError(["system: is another text than that of the first message. Keep one of them"])
    return turns if turns[:1] == system else [*system, *turns]


def _pair_of(said: Mapping[str, object]) -> list[tuple[Turns, int]]:
    """The messages with the chosen answer, and with the rejected one, and how many of them are the prompt. Raises InputError."""
    if not {*ANSWERS} <= said.keys():
        raise InputError([f"{_keys_of(said)}. {_PREFERENCE}"])
    before, answers = _turns(said, "prompt") or _turns(said, "conversations"), [_turns(said, key) for key in ANSWERS]
    is_whole = [turns[0]["role"] != "assistant" for turns in answers]
    if all(is_whole):
        # Each answer is a conversation with the prompt in front.
        count = next((n for n, (one, other) in enumerate(zip(*answers, strict=False)) if one != other), min(map(len, answers)))
        before, answers = _joined(before, answers[0][:count]), [turns[count:] for turns in answers]
    if not before or any(is_whole) != all(is_whole):
        raise InputError([f"chosen and rejected: have no prompt in common. {_PREFERENCE}"])
    if not all(answers) or answers[0] == answers[1]:
        raise InputError(["chosen and rejected: are the same, or one is the beginning of the other. Remove the row"])
    before = _with_system(said, before)
    return [([*before, *turns], len(before)) for turns in answers]


def _joined(prompt: Turns, shared: Turns) -> Turns:
    """A prompt and the messages that both answers begin with, which may have it already. Raises InputError."""
    if not prompt or prompt in (shared[: len(prompt)], shared[-len(prompt) :]):
        return shared
    if prompt[-1]["role"] == "user":
        raise InputError(["prompt: ends with another question than the messages that chosen and rejected begin with. Keep one of them"])
    return [*prompt, *shared]


def _keys_of(said: Mapping[str, object]) -> str:
    return f"has values in {', '.join(map(shown, [*said][:12])) or 'no key'}"


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
