"""Strong and weak scaling: measured on 1 to 8 virtual CPU devices, and planned for 8 to 4096 described GPUs, without having one.

    python benchmarks/scaling.py [--json] [--save] [--plot FILE] [--target h100] [--sizes 8 64 512 4096] [--models llama-8b] [--all]

Strong scaling: the batch stays at 512 sequences of 8192 tokens, accumulated in parts of one sequence for each group of GPUs that shares
one. Weak scaling: the batch grows with the number of GPUs. Parameters are sharded over `fsdp` and replicated over `data`; `tensor` splits
the work on a sequence. A plan is a prediction (docs/plan.md); each takes 5 to 60 s and runs in its own process. --all plans every power of
two, for llama-8b and llama-70b. `mfu` counts attention causally and does not count recompute. --save also draws the picture beside the
JSON; drawing needs the extra `plot`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, FailedError, make_parser, report, run_process, table
from jgt.planner.hardware.chip import load_chip
from train.config import load

GLOBAL_BATCH = 512
HOST = 8
LARGEST_FSDP = {"llama-8b": 8, "llama-70b": 32}
SMALLEST = {"llama-8b": 8, "llama-70b": 64}
POWERS = tuple(2**power for power in range(3, 13))


def main() -> None:
    """Measures, plans, and prints two tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", default="h100", metavar="CHIP")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 512, 4096], help="numbers of GPUs, powers of two from 8 to 4096")
    parser.add_argument("--models", nargs="+", choices=SMALLEST, default=["llama-8b"])
    parser.add_argument("--all", action="store_true", help="plan all sizes and all models")
    parser.add_argument("--steps", type=int, default=10, help="timed steps on CPU for each number of devices; 0: none")
    parser.add_argument("--plot", metavar="FILE", help="draw the result to this PNG file")
    arguments = parser.parse_args()
    if wrong := [size for size in arguments.sizes if size not in POWERS]:
        parser.error(f"--sizes: {wrong[0]} is not a power of two from 8 to 4096")
    try:
        found = {"measured": measured(arguments.steps), "planned": list(planned(arguments))}
    except FailedError as error:
        sys.exit(str(error))
    saved = report("scaling", found, arguments, _lines(found))
    for path in filter(None, [arguments.plot, saved and saved.with_suffix(".png")]):
        from benchmarks.plot_scaling import draw  # noqa: PLC0415 - an optional dependency

        draw(found, Path(path))
        print(f"Wrote {path}", file=sys.stderr)


def measured(num_steps: int) -> list[dict[str, Any]]:
    """Rows measured on virtual CPU devices."""
    if not num_steps:
        return []
    return run_process([sys.executable, "-m", "benchmarks.measure_scaling", str(num_steps)], {"JAX_PLATFORMS": "cpu"}).found


def planned(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model, kind of scaling and number of GPUs."""
    for model in SMALLEST if arguments.all else arguments.models:
        for kind in ("strong", "weak"):
            first: dict[str, Any] | None = None
            for size in POWERS if arguments.all else sorted(arguments.sizes):
                if size < SMALLEST[model]:
                    continue
                print(f"planning {model}, {kind}, {size} GPUs ...", file=sys.stderr)
                row = plan(model, kind, size, arguments.target)
                first = first or row
                row["efficiency"] = row["tokens_per_s"] / row["gpus"] / (first["tokens_per_s"] / first["gpus"])
                yield row


def layout(model: str, kind: str, size: int) -> dict[str, int]:
    """The sizes of the mesh, the batch in sequences, and the number of parts in which it is accumulated.

    The GPUs of a tensor group share a sequence. llama-8b needs groups only with more GPUs than sequences; llama-70b has one per host.
    """
    tensor = HOST if model == "llama-70b" else max(1, size // GLOBAL_BATCH) if kind == "strong" else 1
    shards = size // tensor
    fsdp = min(LARGEST_FSDP[model], shards)
    batch = GLOBAL_BATCH if kind == "strong" else shards
    return {"data": shards // fsdp, "fsdp": fsdp, "tensor": tensor, "batch": batch, "accumulate": batch // shards}


def plan(model: str, kind: str, size: int, chip: str) -> dict[str, Any]:
    """One plan as a row."""
    sizes = layout(model, kind, size)
    overrides = [
        f"rules={ROOT / 'configs/rules/fsdp_tensor.yaml'}",
        f"mesh={{data: {sizes['data']}, fsdp: {sizes['fsdp']}, tensor: {sizes['tensor']}}}",
        f"train.batch={sizes['batch']}",
        f"train.accumulate={sizes['accumulate']}",
    ]
    config = str(ROOT / f"configs/{model}.yaml")
    sample = run_process(
        [sys.executable, "-m", "jgt", "plan", "--config", config, "--target", f"{chip}:{size // HOST}x{HOST}", "--json", *overrides]
    )
    told, shape = sample.found, load(config, overrides[:2]).config.model
    num_parameters = sum(math.prod(parameter["shape"]) for parameter in told["parameters"])
    seconds = told["step_time_ms"] / 1e3
    tokens = sizes["batch"] * shape.seq / seconds
    return {
        "model": model,
        "scaling": kind,
        "gpus": size,
        **sizes,
        "step_s": seconds,
        "tokens_per_s": tokens,
        "mfu": tokens * shape.flops_per_token(num_parameters) / (size * load_chip(chip).peak_flops("bf16")),
        "exposed_ms": {axes: told["exposed_ms"].get(axes, 0.0) for axes in told["links_ms"]},
        "peak_gb": told["memory"]["peak_bytes"] / 1e9,
        "fits": told["memory"]["fits"],
        "plan_s": sample.s,
    }


def _lines(found: Mapping[str, Sequence[dict[str, Any]]]) -> Iterator[str]:
    if found["measured"]:
        yield "Measured on virtual CPU devices, which share the cores of this machine: work, not speed"
        yield from table(found["measured"])
    if found["planned"]:
        yield "Predicted by plans"
        yield from table([row | {"exposed_ms": _waits(row["exposed_ms"])} for row in found["planned"]])


def _waits(exposed: Mapping[str, float]) -> str:
    return ", ".join(f"{axes} {ms:.0f}" for axes, ms in exposed.items() if ms >= 1) or "none"


if __name__ == "__main__":
    main()
