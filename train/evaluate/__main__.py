"""The command line of `jgt eval`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jgt import CommandParser, Console
from jgt.document import InputError

from ..command_line import whole_number
from ..sections import is_installed


def main(argv: Sequence[str] | None = None) -> int:
    """`jgt eval MODEL`. Returns the exit code: 2 if the input is wrong, and stderr says why."""
    return parser().answer(argv, _evaluate)


def parser() -> CommandParser:
    """The command line of the evaluation."""
    parser = CommandParser("jgt eval", "Evaluates a model: on the data that its run held out, on texts, or on tasks.")
    model = "a run directory, one of the steps in its checkpoints, or a folder of Hugging Face"
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace those of the run's config")
    parser.add_argument("--text", nargs="+", metavar="FILE", help="files, folders or globs of texts: plain, JSON lines, Parquet or Arrow")
    parser.add_argument("--field", default="text", metavar="NAME", help="the field or column with the text (text)")
    stride = "the tokens that a window scores, less than its length for more context (the model's sequence length)"
    parser.add_argument("--stride", type=whole_number(), metavar="N", help=stride)
    parser.add_argument("--tasks", metavar="A,B", help="tasks of lm-evaluation-harness")
    parser.add_argument("--include", metavar="DIR", help="a folder with more tasks, as YAML files")
    parser.add_argument("--limit", type=whole_number(), metavar="N", help="the first N documents of each task only")
    parser.add_argument("--fewshot", type=whole_number(0), metavar="N", help="the examples in front of each question (the task's own)")
    out = "the folder for the results of tasks and for answers, which the next call does not compute again (evaluations)"
    parser.add_argument("--out", default="evaluations", metavar="DIR", help=out)
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="the mesh, such as fsdp=4,tensor=2 (the run's; one device for a folder)")
    parser.add_argument("--rules", metavar="RULES", help="the rules, such as jgt:fsdp or a file (the run's)")
    parser.add_argument("--batch", type=whole_number(), default=16, metavar="N", help="the rows that are computed together (16)")
    parser.add_argument(
        "--code", action="append", default=[], metavar="PATH", help="a Python file or folder with the run's own code; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _evaluate(arguments: argparse.Namespace) -> None:
    if arguments.tasks and not is_installed("lm_eval"):
        raise InputError(["command line: --tasks: needs the package lm_eval. Install it: pip install 'jgt[eval]'"])
    if arguments.include is not None and not Path(arguments.include).is_dir():
        raise InputError([f"command line: --include {arguments.include}: no such folder"])
    mesh = _mesh(arguments.mesh)
    from ..compiled import programs_on_trial

    with programs_on_trial():
        result, table = _results(arguments, mesh)
    if arguments.json:
        print(json.dumps(result, indent=1, default=str))
    else:
        _print(result, table)


def _results(arguments: argparse.Namespace, mesh: Mapping[str, int] | None) -> tuple[dict[str, Any], str]:
    """All results as JSON has them, and the harness's table of tasks."""
    from ..loaded import load_model
    from .held_out import evaluate_held_out
    from .likelihood import Scorer
    from .text import evaluate_texts

    is_own = not (arguments.text or arguments.tasks)
    # Only the held-out data of a run needs the run's own program.
    overrides = [*arguments.overrides, *([] if is_own else ["pipeline=null", "sync=null"])]
    is_run = not (Path(arguments.model.removeprefix("hf:")) / "config.json").is_file()
    if is_own and not is_run:
        raise InputError([f"{arguments.model}: a folder of Hugging Face has no data of its own. Add --text FILE or --tasks A,B"])
    is_sharded = is_run and mesh is None and arguments.rules is None
    loaded = load_model(arguments.model, overrides, code=arguments.code, sharded=is_sharded, mesh=mesh, rules=arguments.rules)
    result: dict[str, Any] = {"model": arguments.model, "step": loaded.step}
    if is_own:
        result["held_out"] = evaluate_held_out(loaded)
    if arguments.text:
        losses = evaluate_texts(Scorer(loaded, arguments.batch), arguments.text, field=arguments.field, stride=arguments.stride)
        result["text"] = [loss.to_json() for loss in losses]
    table = ""
    if arguments.tasks:
        from .harness import evaluate_tasks

        results = evaluate_tasks(
            Scorer(loaded, arguments.batch),
            arguments.tasks.split(","),
            out=Path(arguments.out),
            include=arguments.include,
            limit=arguments.limit,
            fewshot=arguments.fewshot,
        )
        result["tasks"], table = results.values, results.table
    return result, table


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
        rows = [[name, f"{value:.4f}", f"{math.exp(min(value, 700)):,.2f}" if "loss" in name else ""] for name, value in values.items()]
        console.print(Console.table(f"Held-out data, step {result['step']}", ["metric", "value", "perplexity"], 1, rows))
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


if __name__ == "__main__":
    sys.exit(main())
