"""Whether the layout that a search chooses for CPU devices is the fastest: all layouts of small models, measured.

    python benchmarks/chosen.py [--json] [--save] [MODEL ...]

For each model a search chooses, as with `train.auto`, among every mesh of 8 devices with every shipped rules file, without recompute and
accumulation; pipelines are 1f1b with 4 microbatches. Then the step of each of these layouts is measured, in rounds of which the fastest one
counts. Layouts that do not compile are not there.

    chosen          seconds of the layout that the search chooses, and its rank among all
    fastest         seconds of the fastest layout
    over            chosen / fastest - 1
    repeat          the spread of the fastest layout's rounds: (slowest - fastest) / fastest
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.calibrated import DEVICES, kendall, measured, say
from benchmarks.harness import make_parser, report, table
from jgt.mesh.mesh import use_virtual_cpu
from jgt.planner.hardware.target import Target
from train.plan.auto import fastest
from train.plan.make import answer
from train.plan.search.layout import Candidate
from train.plan.search.plans import Plans, RunFile
from train.plan.search.search import LayoutSearch
from train.plan.search.space import OpenLayout, candidates

MOST_OVER = 0.05
MODELS = {
    "small": {"kind": "gpt", "layers": 4, "embed": 128, "heads": 4, "vocab": 512, "seq": 128},
    "middle": {"kind": "llama", "layers": 4, "embed": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 1024, "seq": 128},
    "large": {"kind": "gpt", "layers": 2, "embed": 512, "heads": 8, "vocab": 2048, "seq": 128},
}
_TOP = 6


def is_tried(candidate: Candidate) -> bool:
    """Whether a layout is one of those that are compared. Of pipelines, a schedule each."""
    stages = candidate.stages
    plain = stages is not None and (stages.schedule, stages.virtual, stages.microbatches) == ("1f1b", None, 4)
    return stages is None or (plain and stages.remat == "none" and stages.gather == "step")


def compare(name: str, target: Target, folder: Path) -> dict[str, Any]:
    """Searches and measures for one model."""
    file = folder / f"{name}.yaml"
    # JSON is YAML.
    file.write_text(json.dumps({"model": MODELS[name], "train": {"steps": 1, "batch": 16, "remat": "none", "accumulate": 1}}))
    run_file = RunFile(config=str(file))
    opened = OpenLayout.read(run_file)
    space = [one for one in candidates(opened, DEVICES) if is_tried(one)]
    search = LayoutSearch(opened=opened, target=target, space=space, plans=Plans(answer, None), seconds=600, top=_TOP, say=say)
    search.run()
    ranked = search.ranked()
    found = fastest(ranked, run_file.adding(f"devices.virtual_cpu={DEVICES}"), say)
    rounds = measured({one.text: run_file.adding(*one.overrides, f"devices.virtual_cpu={DEVICES}").load() for one in space})
    seconds = {layout: min(samples) for layout, samples in rounds.items()}
    order = sorted(seconds, key=lambda layout: seconds[layout])
    taken, best = found.candidate.text, rounds[order[0]]
    planned = [t for t in ranked if t.candidate.text in seconds]
    return {
        "model": name,
        "layouts": len(seconds),
        "chosen": f"{taken}: {seconds[taken]:.3f} s",
        "rank": order.index(taken) + 1,
        "fastest": f"{order[0]}: {min(best):.3f} s",
        "slowest": round(seconds[order[-1]], 3),
        "over": round(seconds[taken] / min(best) - 1, 3),
        "repeat": round((max(best) - min(best)) / min(best), 3),
        "planned": len(planned),
        "order of plans": round(kendall([t.plan.seconds for t in planned], [seconds[t.candidate.text] for t in planned]), 2),
    }


def main() -> None:
    """Prints a line for each model, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (all)")
    arguments = parser.parse_args()
    use_virtual_cpu(DEVICES)
    target = Target.of_devices("cpu", DEVICES)
    with tempfile.TemporaryDirectory() as folder:
        rows = [compare(name, target, Path(folder)) for name in arguments.models or MODELS]
    report("chosen", {"most_over": MOST_OVER, "rows": rows}, arguments, table(rows))


if __name__ == "__main__":
    main()
