"""The command `jgt export`, which writes a run's model as a published one."""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jgt import CommandParser
from jgt.document import InputError

from ..checkpoint.saved import find_checkpoint
from ..checkpoint.signature import Key, read_key
from ..checkpoint.steps import find_steps, steps_near
from ..export.adapter import write_adapter
from ..export.form import run_form
from ..export.model import SavedModel
from ..export.write import EXPORTED, write_export
from ..files.bucket import Bucket, is_url, path_or_url
from ..files.ends import EndError
from ..files.streams import say, say_lines
from ..run.load import open_run_folder
from ..settings.code.files import read_code
from ..settings.command_line import whole_number
from ..weights.adapt.config import LoraConfig
from ..weights.adapters import CONFIG as ADAPTER
from ..weights.origin import DESCRIPTION

_UNITS = {"": 1, "MB": 10**6, "GB": 10**9}


def export(argv: Sequence[str] | None = None) -> int:
    """`jgt export RUN OUT`. Returns the exit code: 2 if the model cannot be exported, 1 for an error of the disk, and stderr says why."""
    try:
        return export_parser().answer(argv, _export)
    except EndError as error:
        say(str(error))
        return error.code


def export_parser() -> CommandParser:
    """The command line of `jgt export`."""
    parser = CommandParser("jgt export", "Writes the model of a run as a folder that Hugging Face's transformers loads.")
    parser.takes_urls = True
    parser.add_argument("run", metavar="RUN", help="a run directory, or the URL of a run in a bucket, or one of the steps there")
    parser.add_argument("out", metavar="OUT", help="the folder to write, or its URL in a bucket")
    keys = "values that replace those of the run's file, such as model.hf=FOLDER for a model that was moved"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value", help=keys)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--merge", action="store_true", help="the whole model of a run with an adapter, which is added to the weights")
    forms.add_argument("--adapter", action="store_true", help="the adapter of a run alone, as Hugging Face's PEFT loads it")
    parser.add_argument("--step", type=whole_number(), metavar="N", help="the step of the run to write (its newest checkpoint)")
    parser.add_argument("--dtype", choices=list(EXPORTED), default="f32", help="the type of the tensors (f32)")
    parser.add_argument("--max-file", metavar="SIZE", default="5GB", help="the size of a file, such as 5GB or 500MB (5GB)")
    code = "a Python file or folder with the model of the run, if it is your own; repeatable"
    parser.add_argument("--code", action="append", default=[], metavar="PATH", help=code)
    return parser


def _export(arguments: argparse.Namespace) -> None:
    size = re.fullmatch(r"(\d+(?:\.\d+)?)(MB|GB|)", arguments.max_file)
    if size is None or float(size[1]) <= 0:
        raise InputError([f"command line: --max-file {arguments.max_file}: must be a size, such as 5GB or 500MB"])
    # The accelerators of this machine stay with whatever runs on them.
    jax.config.update("jax_platforms", "cpu")
    folder, run = open_run_folder(path_or_url(arguments.run), read_code(arguments.code), arguments.overrides)
    _check_form(arguments, run.config.lora)
    key = read_key(run.config.checkpoint.key)
    saved, reports = find_checkpoint(_checkpoint(path_or_url(arguments.run), arguments.step, key), key)
    if saved is None:
        raise InputError([*reports, f"{arguments.run}: has no whole checkpoint{steps_near(path_or_url(arguments.run))}"])
    model = SavedModel.of(saved, run.config.model, run.config.lora)
    form = run_form(run, folder, model.shapes)
    most = round(float(size[1]) * _UNITS[size[2]])
    with _written(arguments.out) as out:
        if arguments.adapter:
            count = write_adapter(form, model, run.config.model, out, dtype=arguments.dtype)
        else:
            count = write_export(form, model, out, dtype=arguments.dtype, max_file_bytes=most)
    say_lines(reports)
    print(f"Wrote {count:,} tensors of step {saved.manifest.step} to {arguments.out}")


@contextlib.contextmanager
def _written(place: str) -> Iterator[Path]:
    """A folder to write, whose files are stored as objects if its place is a URL. Raises InputError if there are some, and StoreError."""
    if not is_url(place):
        yield Path(place)
        return
    bucket = Bucket(place)
    if bucket.names():
        raise InputError([f"command line: OUT {place}: is there already. Name another URL, or remove it"])
    with tempfile.TemporaryDirectory() as scratch:
        yield (folder := Path(scratch) / "model")
        # Nothing loads a model without its config.json, or an adapter without its adapter_config.json, so these are stored last.
        for file in sorted(folder.iterdir(), key=lambda file: file.name in (DESCRIPTION, ADAPTER)):
            say(f"storing {bucket.url(file.name)}: {file.stat().st_size / 1e6:,.1f} MB")
            bucket.write(file.name, file.read_bytes())


def _check_form(arguments: argparse.Namespace, lora: LoraConfig | None) -> None:
    """Raises InputError if a run with an adapter is to be exported in no form, or one without an adapter in the form of one."""
    named = next((name for name in ("merge", "adapter") if getattr(arguments, name)), None)
    if lora is not None and named is None:
        why = "trains an adapter. --merge writes the model with the adapter added, --adapter the adapter alone, in PEFT's format"
        raise InputError([f"command line: {arguments.run}: {why}"])
    if lora is None and named is not None:
        raise InputError([f"command line: --{named}: {arguments.run} trains no adapter (it has no section lora). Leave the option out"])


def _checkpoint(path: Path | str, step: int | None, key: Key | None) -> Path | str:
    """The path of a step of a run, or the path that was given for its newest one."""
    if step is None:
        return path
    steps, named = find_steps(path, key)
    listed = steps.listed() if named is None else [named]
    if step not in listed:
        has = ", ".join(map(str, listed)) or "none"
        raise InputError([f"command line: --step {step}: {path} has no checkpoint of this step. It has: {has}"])
    return steps.path(step)
