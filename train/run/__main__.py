"""The command lines of `jgt check`, `jgt inspect` and `jgt verify`. They import JAX only for a config without problems."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from jgt import CommandParser
from jgt.document import InputError, Node, bind

from ..config import load
from ..files.cache import local_folder
from ..files.ends import Exit
from ..files.streams import discard_unwritten, say
from ..models.config import ModelConfig
from ..settings.command_line import RunParser, whole_number
from ..weights.described import published


def check(argv: Sequence[str] | None = None) -> int:
    """Prints the placement of the parameters, or windows of the data. Exit code 2, with all problems on stderr (or printed as JSON)."""
    parser = check_parser()
    arguments = parser.parse_args(argv)
    if arguments.eval is not None and arguments.show_data is None:
        parser.error("--eval says which windows --show-data shows. Add --show-data")
    try:
        # --devices replaces the number of devices in the file.
        devices = [] if arguments.devices is None else [f"devices.virtual_cpu={arguments.devices}"]
        run = load(arguments.config, [*arguments.overrides, *devices], code=arguments.code)
        if arguments.show_data is not None:
            import jax

            from ..records.windows import data_windows, print_windows
            from .opened import opened_data

            # The user's code may start JAX.
            jax.config.update("jax_platforms", "cpu")
            data = opened_data(run)
            windows = data_windows(run, data, arguments.show_data, arguments.eval)
            if arguments.json:
                print(json.dumps({"ok": True, "windows": list(windows)}, indent=1))
            else:
                print("\n".join(data.notes), end="\n" * bool(data.notes))
                print_windows(windows)
            return 0
        from .check import check_placement, inserted_json, print_check, print_inserted, to_json

        setup = check_placement(run)
    except InputError as error:
        if arguments.json:
            print(json.dumps({"ok": False, "problems": error.problems}, indent=1))
        else:
            print("\n".join(error.problems), file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(to_json(setup) | (inserted_json(setup) if arguments.inserted else {}), indent=1))
    elif arguments.inserted:
        print_inserted(setup)
    else:
        print_check(setup)
    return 0


def check_parser() -> RunParser:
    """The command line of the check."""
    parser = RunParser("jgt check", "Checks rules against mesh and shapes, without devices.")
    parser.add_argument("--devices", type=whole_number(), metavar="N", help="the number of devices to check for")
    inserted = "show each constraint that jgt inserts, with the line of its rule and the line of the operation"
    parser.add_argument("--inserted", action="store_true", help=inserted)
    windows = "print the first N windows (1) of the training data instead: a line for each token"
    parser.add_argument("--show-data", type=whole_number(), nargs="?", const=1, metavar="N", help=windows)
    held_out = "with --show-data: print windows of the held-out data, of one part of a mixture or of each"
    parser.add_argument("--eval", nargs="?", const="", metavar="PART", help=held_out)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def inspect(argv: Sequence[str] | None = None) -> int:
    """`jgt inspect PATH`. Returns the exit code: 2 if jgt does not know a model at PATH, and stderr says why."""
    return inspect_parser().answer(argv, _inspect)


def _inspect(arguments: argparse.Namespace) -> None:
    described, problems = published(local_folder(arguments.path, weights=False)), list[str]()
    config: ModelConfig | None = bind(Node.of(dict(described.keys), f"{described.file}:1", "model"), ModelConfig, problems)
    if config is None or problems:
        raise InputError(problems)
    from .check import print_published

    print_published(described, config, shows_tensors=arguments.tensors)


def inspect_parser() -> CommandParser:
    """The command line of `jgt inspect`."""
    parser = CommandParser("jgt inspect", "Shows the model that a folder of Hugging Face, or a config.json, describes.")
    parser.takes_urls = True
    parser.add_argument("path", metavar="PATH", help="a folder with config.json, or a config.json alone")
    parser.add_argument("--tensors", action="store_true", help="show the tensors of every parameter")
    return parser


def verify(argv: Sequence[str] | None = None) -> int:
    """Prints what the layout changes. Exit code 1 if it changes a number, 2 with all problems if the input is wrong."""
    arguments = verify_parser().parse_args(argv)
    if arguments.beside is not None:
        from ..verify.child import compare_beside

        return compare_beside(arguments.beside)
    try:
        run = load(arguments.config, arguments.overrides, code=arguments.code)
        from ..verify.compare import compare_layouts
        from ..verify.limits import Limits, gigabytes_in_use
        from ..verify.small import small_run

        limits = Limits(cpu_seconds=arguments.cpu_seconds, gigabytes=arguments.memory)

        def end(too_much: str) -> None:
            remedy = "Set smaller sizes, such as train.batch=8 or those among the keys of model:, or raise --cpu-seconds or --memory"
            say(f"Nothing was compared: it takes {too_much}. {remedy}")
            discard_unwritten()
            os._exit(Exit.INPUT)

        with limits.watched(end):
            small = small_run(run, arguments.devices, arguments.overrides)
            comparison = compare_layouts(small, run)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"ok": comparison.is_right, "mesh": small.mesh, **asdict(comparison)}, indent=1))
    else:
        sizes = " x ".join(f"{axis}={size}" for axis, size in small.mesh.items() if size > 1) or "one device"
        used = f"{time.process_time():.0f} of {limits.cpu_seconds} CPU-seconds, {gigabytes_in_use():.1f} of {limits.gigabytes} GB"
        print(f"Compared on {sizes} with one device, in {comparison.seconds:.0f} s ({used})\n{comparison}")
    return 0 if comparison.is_right else 1


def verify_parser() -> RunParser:
    """The command line of the comparison."""
    parser = RunParser("jgt verify", "Compares a run's layout with one device, at small sizes: results, gradients, an optimizer step.")
    # A run starts the command so for itself, and gives the run in an open file.
    parser.add_argument("--beside", type=whole_number(0), help=argparse.SUPPRESS)
    most = "at most this many virtual CPU devices (default 8)"
    parser.add_argument("--devices", type=whole_number(), default=8, metavar="N", help=most)
    parser.add_argument(
        "--cpu-seconds", type=whole_number(), default=600, metavar="N", help="CPU time after which it gives up (default 600)"
    )
    parser.add_argument("--memory", type=whole_number(), default=8, metavar="GB", help="memory above which it gives up (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
