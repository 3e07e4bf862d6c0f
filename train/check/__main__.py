"""The command line of the check. It imports JAX only after the config itself is found to be right."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from jgt.document import InputError

from ..code.files import read_code
from ..command_line import RunParser, whole_number
from ..config import load


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the placement of the parameters. Exit code 2, with all problems on stderr (or printed as JSON), if anything is wrong."""
    arguments = parser().parse_args(argv)
    try:
        # --devices replaces the number of devices in the file.
        devices = [] if arguments.devices is None else [f"devices.virtual_cpu={arguments.devices}"]
        run = load(arguments.config, [*arguments.overrides, *devices], code=read_code(arguments.code))
        from .report import check_placement, print_check, to_json

        setup = check_placement(run)
    except InputError as error:
        if arguments.json:
            print(json.dumps({"ok": False, "problems": error.problems}, indent=1))
        else:
            print("\n".join(error.problems), file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(to_json(setup), indent=1))
    else:
        print_check(setup)
    return 0


def parser() -> RunParser:
    """The command line of the check."""
    parser = RunParser("jgt check", "Checks rules against mesh and shapes, without devices.")
    parser.add_argument("--devices", type=whole_number, metavar="N", help="the number of devices to check for")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
