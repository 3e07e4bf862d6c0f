"""What `overlap: tensor` hides in Llama 3 70B on 256 H100, fsdp 32 x tensor 8. By plan, without a GPU.

    python benchmarks/overlap.py [--json] [--save] [--preset none] [ROW ...]

The batch has 512 sequences of 8192 tokens, and each layer is recomputed. Each row is planned twice: with the rules of overlap.yaml, and of
fsdp_sequence.yaml without rings.

    exposed    seconds of a step that a device waits for its tensor axis, without rings and with them, and their ratio
    step       predicted seconds of a step, likewise
    peak       GiB of memory, likewise
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import FailedError, make_parser, report, run_process, table

ROOT = Path(__file__).parents[1]
CONFIG, TARGET = str(ROOT / "configs" / "llama-70b.yaml"), "h100:32x8"
RULES = {"plain": ROOT / "configs" / "rules" / "fsdp_sequence.yaml", "rings": ROOT / "configs" / "rules" / "overlap.yaml"}
ROWS = {
    "512 sequences": ("train.batch=512",),
    "128 sequences": ("train.batch=128",),
    "64 sequences, remat matmuls": ("train.batch=64", "train.remat=matmuls"),
}


def main() -> None:
    """Prints a line for each row, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to plan (default: all): {'; '.join(ROWS)}")
    parser.add_argument("--preset", default="auto", help="xla.preset of the runs (auto)")
    arguments = parser.parse_args()
    if unknown := [row for row in arguments.rows if row not in ROWS]:
        parser.error(f"{unknown[0]!r} is not a row. Known rows: {'; '.join(ROWS)}")
    try:
        found = {row: measured(*ROWS[row], f"xla.preset={arguments.preset}") for row in arguments.rows or ROWS}
    except FailedError as error:
        sys.exit(str(error))
    report("overlap", found, arguments, table([{"row": name} | row for name, row in found.items()]))


def measured(*overrides: str) -> dict[str, Any]:
    """The figures of a row."""
    command = [sys.executable, "-m", "jgt", "plan", "--config", CONFIG, "--target", TARGET, "--json", *overrides]
    plans = {name: run_process([*command, f"rules={path}"]).found for name, path in RULES.items()}
    exposed = {name: plan["exposed_ms"]["tensor"] / 1e3 for name, plan in plans.items()}
    return {
        **{f"exposed_{name}_s": round(seconds, 2) for name, seconds in exposed.items()},
        "ratio": round(exposed["rings"] / exposed["plain"], 3),
        **{f"step_{name}_s": round(plan["step_time_ms"] / 1e3, 2) for name, plan in plans.items()},
        **{f"peak_{name}_gib": round(plan["memory"]["peak_bytes"] / 2**30, 1) for name, plan in plans.items()},
    }


if __name__ == "__main__":
    main()
