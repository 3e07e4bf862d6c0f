"""`jgt check --config FILE`: rules against mesh and shapes, in seconds, with no devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jgt.document import InputError
from train.config import Run, load

if TYPE_CHECKING:
    from train.setup import Setup


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: everything fits; 2: it does not, and stderr (or `problems`, with --json) says why."""
    arguments = _parser().parse_args(argv)
    try:
        # --devices stands for the devices of the file, whatever it says.
        devices = [] if arguments.devices is None else [f"devices.virtual_cpu={arguments.devices}"]
        run = load(arguments.config, [*arguments.overrides, *devices])
        setup = _prepare(run)
    except InputError as error:
        if arguments.json:
            print(json.dumps({"ok": False, "problems": error.problems}, indent=1))
        else:
            print("\n".join(error.problems), file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(report(setup), indent=1))
    else:
        _show(setup)
    return 0


def report(setup: Setup) -> dict[str, Any]:
    """The checked placement as plain values."""
    return {
        "ok": True,
        "mesh": dict(setup.mesh.shape),
        "parameters": [
            {
                "name": p.path,
                "signals": list(p.signals),
                "shape": list(p.shape),
                "spec": p.spec,
                "bytes_per_device": p.bytes_per_device(setup.mesh),
            }
            for p in setup.placement.parameters
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jgt check", description="Checks rules against mesh and shapes, without devices.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace the file's, such as mesh.tensor=4")
    parser.add_argument("--devices", type=_count, metavar="N", help="check for this many devices")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _prepare(run: Run) -> Setup:
    import jax  # noqa: PLC0415 - after the file is checked

    from train.setup import prepare  # noqa: PLC0415

    jax.config.update("jax_platforms", "cpu")
    sizes = run.mesh
    count = run.config.devices.virtual_cpu
    if run.rules is None:
        count = 1
    if count is None:
        if -1 in sizes.values():
            raise InputError([f"{run.where('mesh')}: mesh: a size is -1: say for how many devices to check with --devices N"])
        count = 1
        for size in sizes.values():
            count *= size
    return prepare(run, num_devices=count)


def _show(setup: Setup) -> None:
    from train.console import Screen  # noqa: PLC0415

    screen = Screen(enabled=True)
    screen.setup(setup)
    screen.say("Everything fits: every rule is used, every sharded dim divides.")
