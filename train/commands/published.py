"""Published models at the command line: `jgt inspect` and `jgt export`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import jax

from jgt import CommandParser
from jgt.document import InputError, Node, bind

from ..checkpoint.saved import find_checkpoint
from ..checkpoint.signature import Key, read_key
from ..checkpoint.steps import find_steps
from ..code.files import read_code
from ..command_line import EndError, say, say_lines, whole_number
from ..export.form import run_form
from ..export.write import EXPORTED, exported_shapes, write_export
from ..models.config import ModelConfig
from ..models.decoder import build
from ..run.load import open_run_folder
from ..weights.described import published
from ..weights.load import open_files

_UNITS = {"": 1, "MB": 10**6, "GB": 10**9}


def inspect(argv: Sequence[str] | None = None) -> int:
    """`jgt inspect PATH`. Returns the exit code: 2 if PATH is no model that jgt knows, and stderr says why."""
    return inspect_parser().answer(argv, _inspect)


def export(argv: Sequence[str] | None = None) -> int:
    """`jgt export RUN OUT`. Returns the exit code: 2 if the model cannot be exported, 1 for an error of the disk, and stderr says why."""
    try:
        return export_parser().answer(argv, _export)
    except EndError as error:
        say(str(error))
        return error.code


def inspect_parser() -> CommandParser:
    """The command line of `jgt inspect`."""
    parser = CommandParser("jgt inspect", "Shows the model that a folder of Hugging Face, or a config.json, describes.")
    parser.add_argument("path", metavar="PATH", help="a folder with config.json, or a config.json alone")
    parser.add_argument("--tensors", action="store_true", help="show the tensors of every parameter")
    return parser


def export_parser() -> CommandParser:
    """The command line of `jgt export`."""
    parser = CommandParser("jgt export", "Writes the model of a run as a folder that Hugging Face's transformers loads.")
    parser.add_argument("run", metavar="RUN", help="a run directory, or one of the steps in its checkpoints")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--step", type=whole_number(), metavar="N", help="the step of the run to write (its newest checkpoint)")
    parser.add_argument("--dtype", choices=list(EXPORTED), default="f32", help="the type of the tensors (f32)")
    parser.add_argument("--max-file", metavar="SIZE", default="5GB", help="the size of a file, such as 5GB or 500MB (5GB)")
    code = "a Python file or folder with the model of the run, if it is your own; repeatable"
    parser.add_argument("--code", action="append", default=[], metavar="PATH", help=code)
    return parser


def _inspect(arguments: argparse.Namespace) -> None:
    described = published(path := Path(arguments.path))
    file, problems = path / "config.json" if path.is_dir() else path, list[str]()
    config: ModelConfig | None = bind(Node.of(dict(described.keys), f"{file}:1", "model"), ModelConfig, problems)
    if config is None or problems:
        raise InputError(problems)
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))[0]
    files = open_files(described, config, shapes) if path.is_dir() else None
    print(f"{described.config['model_type']}: {sum(x.size for x in jax.tree.leaves(shapes)):,} parameters")
    print("\n".join(f"  {name}: {value}" for name, value in described.keys.items()))
    if files is None:
        return
    if arguments.tensors:
        print("\n".join(f"  {path}: {source.name}" for path, source in sorted(files.sources.items())))
    print(f"All {len(files.folder.tensors):,} tensors are known, and none is missing")


def _export(arguments: argparse.Namespace) -> None:
    size = re.fullmatch(r"(\d+(?:\.\d+)?)(MB|GB|)", arguments.max_file)
    if size is None or float(size[1]) <= 0:
        raise InputError([f"command line: --max-file {arguments.max_file}: must be a size, such as 5GB or 500MB"])
    # The accelerators of this machine stay with whatever runs on them.
    jax.config.update("jax_platforms", "cpu")
    folder, run = open_run_folder(Path(arguments.run), read_code(arguments.code))
    key = read_key(run.config.checkpoint.key)
    saved, reports = find_checkpoint(_checkpoint(Path(arguments.run), arguments.step, key), key)
    if saved is None:
        raise InputError([*reports, f"{arguments.run}: has no whole checkpoint"])
    form = run_form(run, folder, exported_shapes(saved))
    most = round(float(size[1]) * _UNITS[size[2]])
    count = write_export(form, saved, Path(arguments.out), dtype=arguments.dtype, max_file_bytes=most)
    say_lines(reports)
    print(f"Wrote {count:,} tensors of step {saved.manifest.step} to {arguments.out}")


def _checkpoint(path: Path, step: int | None, key: Key | None) -> Path:
    """The path of a step of a run, or the path that was given for its newest one."""
    if step is None:
        return path
    steps, named = find_steps(path, key)
    listed = steps.listed() if named is None else [named]
    if step not in listed:
        has = ", ".join(map(str, listed)) or "none"
        raise InputError([f"command line: --step {step}: {path} has no checkpoint of this step. It has: {has}"])
    return steps.path(step)
