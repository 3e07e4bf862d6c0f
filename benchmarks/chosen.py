"""Whether the layout that a search chooses for CPU devices is the fastest: all layouts of small models, measured.

    jgt calibrate --devices 8 --write runs/cpu.yaml
    python benchmarks/chosen.py [--json] [--save] [--chip runs/cpu.yaml] [MODEL ...]

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.calibrated import DEVICES, kendall
from benchmarks.harness import ROOT, make_parser, report, table
from jgt.hardware.chip import Target, parse_target
from train.calibrate.__main__ import measured_devices
from train.calibrate.measured import Measured, Program, measure
from train.calibrate.steps import step_of_run
from train.code.files import Code
from train.config import load
from train.search.auto import fastest
from train.search.layout import Candidate, layout_text
from train.search.plans import Plans, Question
from train.search.search import LayoutSearch
from train.search.space import Open, candidates
from train.search.step import Shape

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
    opened = Open.read(str(file), [], Code())
    space = [one for one in candidates(opened, DEVICES) if is_tried(one)]
    search = LayoutSearch(
        question=Question.on(target, str(file), [], []),
        target=target,
        space=space,
        plans=Plans(None),
        seconds=600,
        top=_TOP,
        model=Shape.of(opened.run.config.model),
        say=_say,
    )
    search.run()
    ranked = search.ranked()
    found = fastest(ranked, str(file), [f"devices.virtual_cpu={DEVICES}"], [], _say)
    measured = _measured(file, space)
    order = sorted(measured, key=lambda layout: measured[layout].seconds)
    taken = layout_text(found.candidate)
    best, chosen = measured[order[0]], measured[taken]
    planned = [t for t in ranked if layout_text(t.candidate) in measured]
    return {
        "model": name,
        "layouts": len(measured),
        "chosen": f"{taken}: {chosen.seconds:.3f} s",
        "rank": order.index(taken) + 1,
        "fastest": f"{order[0]}: {best.seconds:.3f} s",
        "slowest": round(measured[order[-1]].seconds, 3),
        "over": round(chosen.seconds / best.seconds - 1, 3),
        "repeat": round((max(best.rounds) - min(best.rounds)) / best.seconds, 3),
        "planned": len(planned),
        "order of plans": round(
            kendall([t.plan.seconds for t in planned], [measured[layout_text(t.candidate)].seconds for t in planned]), 2
        ),
    }


def _measured(file: Path, space: list[Candidate]) -> dict[str, Measured]:
    """The steps of all layouts that compile, by their text."""
    devices = cast("Sequence[Any]", jax.local_devices())
    programs: list[Program] = []
    for candidate in space:
        run = load(str(file), [*candidate.overrides, f"devices.virtual_cpu={DEVICES}"])
        try:
            programs.append(step_of_run(layout_text(candidate), run, devices))
        except (ValueError, NotImplementedError) as error:
            _say(f"{layout_text(candidate)}: {str(error).splitlines()[0]}")
    return {one.name: one for one in measure(programs, _say)}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Prints a line for each model, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (all)")
    parser.add_argument("--chip", default=str(ROOT / "runs" / "cpu.yaml"), help="the chip file of a calibration (runs/cpu.yaml)")
    arguments = parser.parse_args()
    measured_devices(DEVICES)
    target = parse_target(f"{Path(arguments.chip).stem}:1x{DEVICES}", arguments.chip)
    with tempfile.TemporaryDirectory() as folder:
        rows = [compare(name, target, Path(folder)) for name in arguments.models or MODELS]
    report("chosen", {"most_over": MOST_OVER, "rows": rows}, arguments, table(rows))


if __name__ == "__main__":
    main()
