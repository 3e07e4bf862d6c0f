"""Tokens/s and MFU of llama 0.5B, 1.3B and 3B on one GPU in bf16: the best of remat x attention x batch.

    python benchmarks/mfu.py [--json] [--save] [--sizes 1.3b] [--seqs 2048] [--remat attention block] [--attention cudnn]
    python benchmarks/mfu.py --dry-run

MFU is the FLOP/s of the model divided by the peak of the chip. A token counts as 6 P + 6 L H h S FLOPs: P parameters in matmuls (without
the embedding lookup), L layers, H heads of width h, and S tokens in a sequence. Attention counts only the half of the scores that the
causal mask leaves, hence 6 instead of 12. Recompute does not count (ModelConfig.flops_per_token). `of_ceiling` divides by the FLOP/s that
a large bf16 matmul reaches on the same GPU.

For each size, sequence, remat and attention, the step is compiled with batches 1 and 2. Their memory predicts the largest batch that fits.
This batch and the next smaller one are measured; if one runs out of memory, smaller ones follow. Each measurement has its own process.
--dry-run compiles the smallest model for a described H200, without having one (extra plan-gpu). The whole sweep takes about an hour.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import FailedError, find_device, make_parser, report, run_process, table

SIZES: Mapping[str, Mapping[str, int]] = {
    "0.5b": {"layers": 20, "embed": 1280, "heads": 10, "ffn": 3456},
    "1.3b": {"layers": 24, "embed": 2048, "heads": 16, "ffn": 5504},
    "3b": {"layers": 26, "embed": 3072, "heads": 24, "ffn": 8192},
}
SEQS = (2048, 8192)
REMATS = ("none", "attention", "block")
ATTENTIONS = ("xla", "cudnn")
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TRIED = 2
"""How many batches to measure for each combination: the largest that fits, and smaller ones."""
SHARE = 0.97
"""The share of the allocator's memory that the predicted peak may take. The rest is for other programs and fragmentation."""
# Gives JAX's allocator nearly all of the GPU's memory.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
TARGET = "h200:1x1"


def main() -> None:
    """Runs the sweep and prints a table. Exits with code 1 if the machine has no GPU."""
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seqs", nargs="+", type=int, default=SEQS)
    parser.add_argument("--remat", nargs="+", default=REMATS)
    parser.add_argument("--attention", nargs="+", default=ATTENTIONS)
    parser.add_argument("--dry-run", action="store_true", help=f"compile the smallest model for {TARGET}, without a GPU or measuring")
    arguments = parser.parse_args()
    sweep = list(itertools.product(arguments.sizes, arguments.seqs, arguments.remat, arguments.attention))
    try:
        if arguments.dry_run:
            report("mfu-dry-run", dry_run(*sweep[0]), arguments)
            return
        if find_device()["kind"] == "cpu":
            print(
                "\n".join(
                    f"would measure {size}, sequence {seq}, remat {remat}, attention {attention}" for size, seq, remat, attention in sweep
                )
            )
            sys.exit("This machine has no NVIDIA GPU, so nothing was measured. --dry-run compiles the smallest model for a described H200")
        found = {"ceiling": run_process(_command("ceiling")).found, "rows": []}
        peak, reached = found["ceiling"]["peak"], found["ceiling"]["matmul"]["median"]
        for point in sweep:
            for row in measured(*point):
                if "flops_per_s" in row:
                    flops = row["flops_per_s"]["median"]
                    row |= {"mfu": flops / peak if peak else None, "of_ceiling": flops / reached}
                found["rows"].append(row)
    except FailedError as error:
        sys.exit(str(error))
    found["best"] = list(best(found["rows"]))
    report("mfu", found, arguments, _lines(found))


def dry_run(size: str, seq: int, remat: str, attention: str) -> dict[str, Any]:
    """The memory of a combination with one sequence, compiled for a described GPU, without having one."""
    told = run_process([*_command("memory", size, seq, remat, attention, 1), "--target", TARGET]).found
    return {"size": size, "seq": seq, "remat": remat, "attention": attention, "batch": 1, "target": TARGET, **told}


def measured(size: str, seq: int, remat: str, attention: str) -> Iterator[dict[str, Any]]:
    """The rows of one combination of the sweep, the largest batch first. If a measurement failed, its row gives the reason."""
    point = {"size": size, "seq": seq, "remat": remat, "attention": attention}
    try:
        one, two = (run_process(_command("memory", size, seq, remat, attention, batch), ENVIRONMENT).found for batch in (1, 2))
    except FailedError as error:
        yield point | {"failed": _last_line(error)}
        return
    most = largest_batch(one["peak_bytes"], two["peak_bytes"], SHARE * one["limit_bytes"])
    if most is None:
        yield point | {"failed": f"one sequence needs {one['peak_bytes'] / 1e9:.0f} of {one['limit_bytes'] / 1e9:.0f} GB"}
        return
    done = 0
    for batch in reversed([batch for batch in BATCHES if batch <= most]):
        print(f"measuring {', '.join(map(str, point.values()))}, batch {batch} ...", file=sys.stderr)
        try:
            yield point | run_process(_command("step", size, seq, remat, attention, batch), ENVIRONMENT).found
        except FailedError as error:
            yield point | {"batch": batch, "failed": _last_line(error)}
            continue
        done += 1
        if done == TRIED:
            return


def largest_batch(one: float, two: float, limit: float) -> int | None:
    """The largest of BATCHES that fits within a limit, by the memory of 1 and 2 sequences. None if not even 1 sequence fits."""
    each = max(two - one, 1.0)
    return max((batch for batch in BATCHES if one + (batch - 1) * each <= limit), default=None)


def best(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The fastest row for each size and sequence."""
    known = [row for row in rows if "tokens_per_s" in row]
    for key in dict.fromkeys((row["size"], row["seq"]) for row in known):
        yield max((row for row in known if (row["size"], row["seq"]) == key), key=lambda row: row["tokens_per_s"]["median"])


def _command(name: str, size: str | None = None, seq: int = 0, remat: str = "", attention: str = "", batch: int = 0) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.measure_mfu", name]
    if size is None:
        return command
    shape = [f"model.{key}={value}" for key, value in SIZES[size].items()]
    return [*command, *shape, f"model.seq={seq}", f"model.attention={attention}", f"train.remat={remat}", f"train.batch={batch}"]


def _last_line(error: FailedError) -> str:
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), "")


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    ceiling = found["ceiling"]
    yield f"{ceiling['device']}: a large bf16 matmul reaches {ceiling['matmul']['median'] / 1e12:.0f} TFLOP/s"
    for title, rows in (("All", found["rows"]), ("The best for each size and sequence", found["best"])):
        shown = [
            {key: row[key] for key in ("size", "seq", "remat", "attention", "batch", "tokens_per_s", "mfu", "of_ceiling", "peak_gb")}
            for row in rows
            if "mfu" in row
        ]
        if shown:
            yield title
            yield from table(shown)
    yield from (
        f"failed: {row['size']}, {row['seq']}, {row['remat']}, {row['attention']}, batch {row.get('batch', 1)}: {row['failed']}"
        for row in found["rows"]
        if "failed" in row
    )


if __name__ == "__main__":
    main()
