"""The command `jgt generate`: text from a run's model or a published one, to the screen as it is written, or as JSON lines."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from jgt import CommandParser
from jgt.document import InputError, nearest, shown

from ..files.json_text import read_object
from ..generate.chat import Chat
from ..generate.generate import Completion, Generator, Prompt
from ..generate.text import terminal_text
from ..run.load import load_writer
from ..settings.command_line import add_model, whole_number


def main(argv: Sequence[str] | None = None) -> int:
    """`jgt generate MODEL`. Returns the exit code: 2 if the input is wrong, and stderr says why."""
    return parser().answer(argv, _generate)


def parser() -> CommandParser:
    """The command line of `jgt generate`."""
    made = CommandParser("jgt generate", "Writes what a model continues prompts with.")
    add_model(made, "generate.top_p=0.9")
    made.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text to continue; repeatable")
    made.add_argument("--prompts", metavar="FILE", help="a file of JSON lines with a prompt, or with tokens, in each")
    adapter = "an adapter for the model of a folder of Hugging Face: a folder of PEFT, or a run that trains one; repeatable"
    made.add_argument("--adapter", action="append", default=[], metavar="[NAME=]DIR", help=adapter)
    made.add_argument("--chat", action="store_true", help="prompts are messages of a chat; without any, read them from the terminal")
    made.add_argument("--tokens", type=whole_number(), metavar="N", help="the most new tokens (generate.tokens)")
    made.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest tokens (generate.temperature)")
    made.add_argument("--samples", type=whole_number(), metavar="N", help="the answers to each prompt (generate.samples)")
    made.add_argument("--stop", action="append", metavar="TEXT", help="a text that ends an answer; repeatable (generate.stop)")
    made.add_argument("--seed", type=whole_number(low=0, high=2**32 - 1), metavar="N", help="the seed of the draws (run.seed)")
    made.add_argument("--json", action="store_true", help="print a JSON object for each answer, with tokens and log-probabilities")
    return made


def _generate(arguments: argparse.Namespace) -> None:
    adapters, asked = _asked(arguments)
    warmth = [] if arguments.temperature is None else [f"generate.temperature={arguments.temperature}"]
    loaded = load_writer(arguments.model, [*arguments.overrides, *warmth], arguments.code, adapters)
    chat = Chat.of(loaded.tokenizer, loaded.setup.run.config.data) if arguments.chat else None
    given = {name: getattr(arguments, name) for name in ("tokens", "samples", "stop")}
    changes = {"seed": arguments.seed, **{name: value for name, value in given.items() if value is not None}}
    if chat is not None and chat.template is None:
        print(f"{arguments.model} has no chat template: the model continues the text of all lines and answers", file=sys.stderr)
    if chat is not None:
        asked = [(chat.prompt(_as_messages(prompt)), name) for prompt, name in asked]
    if chat is not None and not asked:
        chat.converse(loaded.generator, changes)
        return
    for name in adapters or [None]:
        numbers = [n for n, (_, own) in enumerate(asked) if own in (None, name)]
        if not numbers:
            continue
        generator, prompts = (loaded if name is None else loaded.adapted(name)).generator, [asked[n][0] for n in numbers]
        if arguments.json:
            for answer in generator.answers(prompts, **changes):
                print(json.dumps(_as_json(answer, numbers[answer.number[0]], name)), flush=True)
            continue
        if len(adapters) > 1:
            print(f"[{name}]")
        _show(generator, prompts, changes)


def _asked(arguments: argparse.Namespace) -> tuple[dict[str, Path], list[tuple[Prompt, str | None]]]:
    """The folders of adapters by names, and the prompts, each with the adapter that it names. Raises InputError with all problems."""
    problems = list[str]()
    asked: list[tuple[Prompt, str | None]] = [(text, None) for text in arguments.prompt]
    adapters = _adapters_of(arguments.adapter, problems)
    if arguments.prompts:
        asked += _prompts_of(Path(arguments.prompts), arguments.chat, adapters, problems)
    if not (asked or arguments.chat or problems):
        problems.append("command line: give prompts with --prompt or --prompts, or --chat to type them")
    if arguments.chat and not asked and len(adapters) > 1:
        problems.append(f"command line: --chat without prompts talks with one adapter, not with {' and '.join(adapters)}. Give one")
    if problems:
        raise InputError(problems)
    return adapters, asked


def _show(generator: Generator, prompts: Sequence[Prompt], changes: dict[str, Any]) -> None:
    """Prints each prompt with its answer: one alone as it is written, several when they are whole."""
    if len(prompts) == 1 and changes.get("samples", 1) == 1:
        # Wrong ones are reported before any text.
        generator.requests(prompts, **changes)
        _print(prompts[0] if isinstance(prompts[0], str) else "")
        for piece in generator.pieces(prompts, **changes):
            _print(piece.text)
        print()
        return
    for answer in generator.answers(prompts, **changes):
        prompt = prompts[answer.number[0]]
        print(terminal_text((prompt if isinstance(prompt, str) else "") + answer.text), flush=True)


def _print(text: str) -> None:
    print(terminal_text(text), end="", flush=True)


def _as_json(answer: Completion, number: int, adapter: str | None) -> dict[str, object]:
    said = {"prompt": number, "sample": answer.number[1], **({} if adapter is None else {"adapter": adapter})}
    return {**said, "text": answer.text, "tokens": answer.tokens, "logprobs": answer.logprobs, "reason": answer.reason}


def _as_messages(prompt: object) -> object:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _adapters_of(values: Sequence[str], problems: list[str]) -> dict[str, Path]:
    """The folders of adapters by names. A folder without a name has its own."""
    adapters: dict[str, Path] = {}
    for value in values:
        given = re.fullmatch(r"([\w.-]+)=(.+)", value)
        name, path = (given[1], Path(given[2])) if given else (Path(value).resolve().name, Path(value))
        if name in adapters:
            problems.append(f"command line: --adapter {value}: {adapters[name]} has the name {name}, too. Write --adapter NAME={path}")
        adapters[name] = path
    return adapters


def _prompts_of(file: Path, is_chat: bool, adapters: Collection[str], problems: list[str]) -> Iterator[tuple[Prompt, str | None]]:
    """The prompts of a file of JSON lines: texts or tokens; of a chat, texts or messages. Each has the adapter that its line names."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            found = read_object(line) or {}
            name, kind = ("messages", dict) if is_chat else ("tokens", int)
            prompt = found.get("prompt", found.get(name))
            if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(one) is kind for one in prompt)):
                if (adapter := found.get("adapter")) not in (None, *adapters):
                    problems.append(f"{file}:{number}: adapter: {shown(adapter)} is not given. {nearest(str(adapter), adapters)}")
                yield prompt, adapter
            elif line.strip():
                problems.append(f'{file}:{number}: is not a JSON object with a prompt or {name}, such as {{"prompt": "Once"}}')
