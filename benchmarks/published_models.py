"""The time of `jgt check` and `jgt plan` of published models, each from its config.json alone, and the memory that its training needs.

python benchmarks/published_models.py [--json] [--save] [--target h100:8x8] [MODEL ...]

The models and their published numbers of parameters are in tests/goldens/published_models.yaml. Each command runs in its own process, after
one that does not count. A model of experts has them on the GPUs of a host, and any other model is sharded over all GPUs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, FailedError, make_parser, report, run_process, table

MODELS: Mapping[str, Any] = yaml.safe_load((ROOT / "tests" / "goldens" / "published_models.yaml").read_text())
CONFIGS = ROOT / "tests" / "goldens" / "configs"
RUN = """
run: {name: published}
model: {dtype: bf16}
mesh: {fsdp: 64}
rules: jgt:fsdp
data: {source: stdlib}
optimizer: {name: adamw, lr: 1e-5, clip: 1.0}
train: {steps: 1000, batch: 64, remat: block}
"""
EXPERTS = ["mesh={data: 1, fsdp: 8, expert: 8}", "rules=jgt:experts"]


def main() -> None:
    """Prints a line for each model, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"models (default: all): {', '.join(MODELS)}")
    parser.add_argument("--target", default="h100:8x8", help="the GPUs of the plans: 64 of any kind (h100:8x8)")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models or MODELS:
            try:
                found[name] = measured(name, Path(folder), arguments.target)
            except FailedError as error:
                found[name] = {"failed": str(error)}
                print(f"{name}: {error}", file=sys.stderr)
    rows = [{"model": name} | row for name, row in found.items() if "failed" not in row]
    report("published_models", found, arguments, table(rows) if rows else [])
    sys.exit(len(rows) < len(found))


def measured(name: str, folder: Path, target: str) -> dict[str, Any]:
    """Seconds of both commands, and the main figures of the plan. Raises FailedError."""
    model = MODELS[name]
    told = model["config"]
    keys = json.loads((CONFIGS / told).read_text()) if isinstance(told, str) else told
    file, config = folder / "run.yaml", folder / name / "config.json"
    config.parent.mkdir()
    file.write_text(RUN)
    config.write_text(json.dumps(keys))
    layout = EXPERTS if "num_experts_per_tok" in keys else []
    arguments = [str(file), f"model.hf={config}", *layout]
    check, plan = (
        run_process([sys.executable, "-m", "jgt", *command])
        for command in (["check", *arguments, "--json"], ["plan", *arguments, "--target", target, "--json"])
    )
    memory = plan.found["memory"]
    return {
        "parameters": model["parameters"],
        "layout": "fsdp 8 x expert 8" if layout else "fsdp 64",
        "peak_gb": round(memory["peak_bytes"] / 1e9, 1),
        "step_ms": round(plan.found["step_time_ms"]),
        "check_s": round(check.s, 1),
        "check_cpu_s": round(check.cpu_s, 1),
        "plan_s": round(plan.s, 1),
        "plan_cpu_s": round(plan.cpu_s, 1),
    }


if __name__ == "__main__":
    main()
