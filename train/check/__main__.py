"""The command. Heavy imports wait for a checked config."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from jgt.document import InputError
from train.config import load
from train.flags import whole_number


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: everything fits; 2: it does not, and stderr (or `problems`, with --json) says why."""
    arguments = _parser().parse_args(argv)
    try:
        # --devices stands for the devices of the file, whatever it says.
        devices = [] if arguments.devices is None else [f"devices.virtual_cpu={arguments.devices}"]
        run = load(arguments.config, [*arguments.overrides, *devices])
        from train.check.report import check, report, show

        setup = check(run)
    except InputError as error:
        if arguments.json:
            print(json.dumps({"ok": False, "problems": error.problems}, indent=1))
        else:
            print("\n".join(error.problems), file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(report(setup), indent=1))
    else:
        show(setup)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jgt check", description="Checks rules against mesh and shapes, without devices.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace the file's, such as mesh.tensor=4")
    parser.add_argument("--devices", type=whole_number, metavar="N", help="check for this many devices")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
