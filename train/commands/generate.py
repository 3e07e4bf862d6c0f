"""The command `jgt generate`: text from a run's model or a published one, to the screen as it is written, or as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jgt import CommandParser
from jgt.document import InputError

from ..command_line import add_model, whole_number
from ..generate.chat import Chat
from ..generate.generate import Completion, Generator
from ..generate.text import terminal_text
from ..run.load import load_writer


def main(argv: Sequence[str] | None = None) -> int:
    """`jgt generate MODEL`. Returns the exit code: 2 if the input is wrong, and stderr says why."""
    return parser().answer(argv, _generate)


def parser() -> CommandParser:
    """The command line of `jgt generate`."""
    made = CommandParser("jgt generate", "Writes what a model continues prompts with.")
    add_model(made, "generate.top_p=0.9")
    made.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text to continue; repeatable")
    made.add_argument("--prompts", metavar="FILE", help="a file of JSON lines with a prompt, or with tokens, in each")
    made.add_argument("--adapter", metavar="DIR", help="an adapter of PEFT for the model of a folder of Hugging Face (lora.hf)")
    made.add_argument("--chat", action="store_true", help="prompts are messages of a chat; without any, read them from the terminal")
    made.add_argument("--tokens", type=whole_number(), metavar="N", help="the most new tokens (generate.tokens)")
    made.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest tokens (generate.temperature)")
    made.add_argument("--samples", type=whole_number(), metavar="N", help="the answers to each prompt (generate.samples)")
    made.add_argument("--stop", action="append", metavar="TEXT", help="a text that ends an answer; repeatable (generate.stop)")
    made.add_argument("--seed", type=whole_number(low=0, high=2**32 - 1), metavar="N", help="the seed of the draws (run.seed)")
    made.add_argument("--json", action="store_true", help="print a JSON object for each answer, with tokens and log-probabilities")
    return made


def _generate(arguments: argparse.Namespace) -> None:
    prompts: list[Any] = [*arguments.prompt, *(_prompts_of(Path(arguments.prompts), arguments.chat) if arguments.prompts else ())]
    if not (prompts or arguments.chat):
        raise InputError(["command line: give prompts with --prompt or --prompts, or --chat to type them"])
    overrides = arguments.overrides
    if arguments.adapter is not None:
        if not (Path(arguments.model.removeprefix("hf:")) / "config.json").is_file():
            remedy = "A run has its own adapter, and jgt export writes its model as such a folder"
            raise InputError([f"command line: --adapter: {arguments.model} is not a folder of Hugging Face. {remedy}"])
        overrides = [*overrides, f"lora.hf={json.dumps(arguments.adapter)}"]
    loaded = load_writer(arguments.model, overrides, arguments.code)
    chat = Chat.of(loaded.tokenizer, loaded.setup.run.config.data) if arguments.chat else None
    given = {name: getattr(arguments, name) for name in ("tokens", "temperature", "samples", "stop")}
    changes = {"seed": arguments.seed, **{name: value for name, value in given.items() if value is not None}}
    if chat is not None and chat.template is None:
        print(f"{arguments.model} has no chat template: the model continues the text of all lines and answers", file=sys.stderr)
    if chat is not None:
        prompts = [chat.prompt(_as_messages(prompt)) for prompt in prompts]
    if chat is not None and not prompts:
        chat.converse(loaded.generator, changes)
    elif arguments.json:
        for answer in loaded.generator.answers(prompts, **changes):
            print(json.dumps(_as_json(answer, prompts[answer.number[0]])), flush=True)
    else:
        _show(loaded.generator, prompts, changes)


def _show(generator: Generator, prompts: Sequence[Any], changes: dict[str, Any]) -> None:
    """Prints each prompt with its answer: one alone as it is written, several when they are whole."""
    if len(prompts) == 1 and changes.get("samples", 1) == 1:
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


def _as_json(answer: Completion, prompt: Any) -> dict[str, Any]:
    number, sample = answer.number
    said = {"prompt": number, "sample": sample, "text": answer.text, "tokens": answer.tokens, "logprobs": answer.logprobs}
    return {**said, "reason": answer.reason}


def _as_messages(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _prompts_of(file: Path, is_chat: bool) -> Iterator[Any]:
    """The prompts of a file of JSON lines: texts or tokens; of a chat, texts or messages. Raises InputError with every line without one."""
    problems: list[str] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            name, kind = ("messages", dict) if is_chat else ("tokens", int)
            prompt = found.get("prompt", found.get(name)) if isinstance(found, dict) else None
            if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(one) is kind for one in prompt)):
                yield prompt
            elif line.strip():
                problems.append(f'{file}:{number}: is not a JSON object with a prompt or {name}, such as {{"prompt": "Once"}}')
    if problems:
        raise InputError(problems)
