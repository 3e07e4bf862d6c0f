"""The command line of `jgt eval`."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgt import CommandParser, Console
from jgt.document import InputError

from ..evaluate.likelihood import Scorer
from ..evaluate.reference import with_reference
from ..evaluate.text import evaluate_texts
from ..files.streams import say
from ..generate.loaded import Loaded
from ..processes.compiled import programs_on_trial
from ..run.directory.identity import Resume, check_data
from ..run.hooks import held_out_means
from ..run.load import load_model
from ..run.opened import opened_data
from ..settings.command_line import add_model, whole_number
from ..settings.packages import is_installed
from ..settings.sampling import EvalConfig
from ..setup.feed import Feed

_NATS = "nats per token"
"""The unit of the trainer's own loss, which alone has a perplexity."""


def main(argv: Sequence[str] | None = None) -> int:
    """`jgt eval MODEL`. Returns the exit code: 2 if the input is wrong, and stderr says why."""
    return parser().answer(argv, _evaluate)


def parser() -> CommandParser:
    """The command line of the evaluation."""
    parser = CommandParser("jgt eval", "Evaluates a model: on the data that its run held out, on texts, or on tasks.")
    add_model(parser, "train.eval_batches=20")
    parser.add_argument("--text", nargs="+", metavar="FILE", help="files, folders or globs of texts: plain, JSON lines, Parquet or Arrow")
    parser.add_argument("--field", default="text", metavar="NAME", help="the field or column with the text (text)")
    stride = "the tokens that a window scores, less than its length for more context (the model's sequence length)"
    parser.add_argument("--stride", type=whole_number(), metavar="N", help=stride)
    parser.add_argument("--tasks", metavar="A,B", help="tasks of lm-evaluation-harness")
    parser.add_argument("--include", metavar="DIR", help="a folder with more tasks, as YAML files")
    parser.add_argument("--limit", type=whole_number(), metavar="N", help="the first N documents of each task only")
    parser.add_argument("--fewshot", type=whole_number(0), metavar="N", help="the examples in front of each question (the task's own)")
    parser.add_argument("--chat", action="store_true", help="questions of tasks are messages of a chat, by the model's chat template")
    out = "the folder for the results of tasks and for answers, which the next call does not compute again (evaluations)"
    parser.add_argument("--out", default="evaluations", metavar="DIR", help=out)
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="the mesh, such as fsdp=4,tensor=2 (the run's; one device for a folder)")
    parser.add_argument("--rules", metavar="RULES", help="the rules, such as jgt:fsdp or a file (the run's)")
    parser.add_argument("--batch", type=whole_number(), default=16, metavar="N", help="the rows that are computed together (16)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _evaluate(arguments: argparse.Namespace) -> None:
    if arguments.tasks and not is_installed("lm_eval"):
        raise InputError(["command line: --tasks: needs the package lm_eval. Install it: pip install 'jgt[eval]'"])
    if arguments.include is not None and not Path(arguments.include).is_dir():
        raise InputError([f"command line: --include {arguments.include}: no such folder"])
    # The flag takes all words that follow it, overrides too.
    words: list[str] = arguments.text or []
    arguments.text = [word for word in words if Path(word).exists() or not re.match(r"[\w.]+=", word)]
    arguments.overrides = [*arguments.overrides, *(word for word in words if word not in arguments.text)]
    mesh = _mesh(arguments.mesh)
    with programs_on_trial():
        result, table = _results(arguments, mesh)
    if arguments.json:
        # JSON has no NaN, which is the mean of no tokens.
        plain = json.loads(json.dumps(result, default=str), parse_constant=lambda _: None)
        print(json.dumps(plain, indent=1))
    else:
        _print(result, table)


def _results(arguments: argparse.Namespace, mesh: Mapping[str, int] | None) -> tuple[dict[str, object], str]:
    """All results as JSON has them, and the harness's table of tasks."""
    is_own = not (arguments.text or arguments.tasks)
    # Only the held-out data of a run needs the run's own program.
    overrides = [*arguments.overrides, *([] if is_own else ["pipeline=null", "sync=null"])]
    is_run = not (Path(arguments.model.removeprefix("hf:")) / "config.json").is_file()
    if is_own and not is_run:
        raise InputError([f"{arguments.model}: a folder of Hugging Face has no data of its own. Add --text FILE or --tasks A,B"])
    is_sharded = is_run and mesh is None and arguments.rules is None
    loaded = load_model(arguments.model, overrides, code=arguments.code, sharded=is_sharded, mesh=mesh, rules=arguments.rules)
    result: dict[str, object] = {"model": arguments.model, "step": loaded.step}
    if is_own:
        result["loss"] = loaded.setup.run.config.train.loss or _NATS
        result["held_out"] = _held_out(loaded)
    if arguments.text:
        losses = evaluate_texts(Scorer(loaded, arguments.batch), arguments.text, field=arguments.field, stride=arguments.stride)
        result["text"] = [loss.to_json() for loss in losses]
    table = ""
    if arguments.tasks:
        # It imports the harness, which takes seconds, and is optional.
        harness = importlib.import_module("..evaluate.harness", __package__)
        scorer = Scorer(loaded, arguments.batch)
        found = harness.evaluate_tasks(scorer, _tasks(arguments), out=Path(arguments.out), identity=_identity(loaded))
        result["tasks"], table = found, harness.table_of(found)
    return result, table


def _tasks(arguments: argparse.Namespace) -> EvalConfig:
    names, examples = arguments.tasks.split(","), {"limit": arguments.limit, "fewshot": arguments.fewshot, "chat": arguments.chat}
    return EvalConfig(tasks=tuple(names), include=arguments.include, **examples)


def _identity(loaded: Loaded) -> str:
    """A name for a model's function from texts to logits: its arrays, its section and its tokenizer, whatever the layout."""
    arrays = hashlib.sha256()
    for x in jax.tree.leaves((loaded.params, loaded.variables)):
        arrays.update(np.asarray(x).tobytes())
    tokenizer = None if loaded.tokenizer is None else loaded.tokenizer.identity
    section = {key: value for key, value in asdict(loaded.config).items() if key != "hf"}
    return hashlib.sha256(json.dumps([arrays.hexdigest(), section, tokenizer], sort_keys=True, default=str).encode()).hexdigest()[:16]


def _held_out(loaded: Loaded) -> dict[str, float]:
    """The evaluation of a run's held-out data, as its training does it: the same program, batches and sums.

    Gives `eval_loss` and its like, and those of each part of a mixture. Raises InputError for a run that holds no data out.
    """
    setup = loaded.setup
    data = opened_data(setup.run)
    if not data.eval_parts:
        raise InputError([f"{setup.run.where('data')}: data: holds nothing out to evaluate on. Name texts with --text FILE"])
    try:
        check_data(setup.run, data.fingerprint, Resume())
    except InputError:
        say("the data is not what the run was trained with, so its losses are not those of training")
    feed = Feed(with_reference(setup, data), setup)
    step = setup.compile_eval_step(feed.eval_batch)
    batches = feed.held_out(setup.run.config.train.eval_batches)
    return held_out_means(step, setup.stored_params(loaded.params), loaded.variables, batches, setup.mesh)


def _mesh(text: str | None) -> dict[str, int] | None:
    """The sizes of a mesh by axis. Raises InputError."""
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.isidentifier() and size.isdecimal() for name, _, size in pairs):
        raise InputError([f"command line: --mesh {text}: must be sizes by axis, such as fsdp=4,tensor=2"])
    return {name: int(size) for name, _, size in pairs}


def _print(result: Mapping[str, Any], table: str) -> None:
    console = Console()
    if "held_out" in result:
        values: Mapping[str, float] = result["held_out"]
        perplexity = ["perplexity"] if result["loss"] == _NATS else []
        rows = [
            [name, f"{value:.4f}", *(f"{math.exp(min(value, 700)):,.2f}" if "loss" in name else "" for _ in perplexity)]
            for name, value in values.items()
        ]
        console.print(Console.table(f"Held-out data, step {result['step']}", ["metric", "value", *perplexity], 1, rows))
    if "text" in result:
        columns = ["text", "documents", "tokens", "bytes", "loss", "perplexity", "bits/byte"]
        rows = [
            [
                part["name"],
                *(f"{part[name]:,}" for name in ("documents", "tokens", "bytes")),
                f"{part['loss']:.4f}",
                f"{part['perplexity']:,.2f}",
                f"{part['bits_per_byte']:.4f}",
            ]
            for part in result["text"]
        ]
        console.print(Console.table("Texts", columns, 1, rows))
    if table:
        print(table, file=sys.stdout)
