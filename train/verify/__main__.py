"""The command line of the comparison. It imports JAX only after the config itself is found to be right."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from jgt.document import InputError

from ..code.files import read_code
from ..command_line import RunParser, whole_number
from ..config import load

_DEVICES = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the layout changes. Exit code 1 if it changes a number, 2 with all problems if the input is wrong."""
    arguments = parser().parse_args(argv)
    try:
        code = read_code(arguments.code)
        run = load(arguments.config, arguments.overrides, code=code)
        from jgt.mesh.mesh import use_virtual_cpu

        from .compare import compare_layouts
        from .small import small_overrides

        small = load(arguments.config, small_overrides(run, arguments.devices, arguments.overrides), code=code)
        # A caller that has started JAX has devices already.
        with suppress(RuntimeError):
            use_virtual_cpu(small.config.devices.virtual_cpu or arguments.devices)
        comparison = compare_layouts(small, run)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"ok": comparison.is_right, "mesh": small.mesh, **asdict(comparison)}, indent=1))
    else:
        sizes = " x ".join(f"{axis}={size}" for axis, size in small.mesh.items() if size > 1) or "one device"
        print(f"Compared on {sizes} with one device, in {comparison.seconds:.0f} s\n{comparison}")
    return 0 if comparison.is_right else 1


def parser() -> RunParser:
    """The command line of the comparison."""
    parser = RunParser("jgt verify", "Compares a run's layout with one device, at small sizes: results, gradients, an optimizer step.")
    parser.add_argument(
        "--devices", type=whole_number, default=_DEVICES, metavar="N", help="at most this many virtual CPU devices (default 8)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
