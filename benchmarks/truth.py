"""How far predicted steps are from published ones: 25 runs on 8 to 3,072 GPUs, each predicted by a fit of the others. Without a GPU.

    python benchmarks/truth.py [--json] [--save] [--folder runs/truth] [--compile-only]

The runs are those of runs.yaml. Each step is compiled once, in its own process, and kept in the folder. Then the free constants of the cost
model (constants.py) are fitted to all families but one, and predict that one.

    step            predicted seconds by the held-out fit, and the published ones
    error           (predicted - published) / published
    bound           the error that 90 % of such layouts stay within, by the held-out errors of the other families
    chips           the constants that fit all runs: those of the chip files, whose predictions are in the column `chip file`
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.constants import PRIORS, RUN, chip_with
from benchmarks.harness import ROOT, FailedError, bar, make_parser, report, run_process, table
from benchmarks.least_squares import Figures, Fit
from benchmarks.published import RUNS
from jgt.planner.hardware.target import Target
from jgt.planner.hlo.text import Module
from jgt.planner.timeline import Timeline

BARS = {"step, without pipelines": 0.15, "step, all": 0.20}
LEAST_ORDER, LEAST_INSIDE = 0.7, 0.8
_NORMAL_90 = 1.645
_PRIOR_RUNS = 4
"""The weight of all kinds of layouts in the bound of one kind, as a number of runs: each kind has only a few."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A compiled run. family: what a fit leaves out together. kind: one_host, several_hosts or pipeline, as in a chip file."""

    target: Target
    hosts: Sequence[int]
    module: Module
    mesh: Mapping[str, int]
    published: float
    model_flops: float
    fits: bool
    family: str
    kind: str

    def seconds(self, constants: Figures | None = None) -> float:
        """The predicted step; without constants, by those of the chip file."""
        chip = self.target.chip if constants is None else chip_with(self.target.chip, constants)
        network = replace(self.target, chip=chip).network(self.hosts)
        return Timeline(self.module, self.mesh, len(self.hosts), network).step().seconds


def compiled(name: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The facts and the text of a run's step, from the folder or freshly compiled. Raises FailedError."""
    row = RUNS[name]
    digest = hashlib.sha256(json.dumps([row.target, row.overrides]).encode()).hexdigest()[:12]
    path = folder / f"{name}-{digest}.json"
    if not path.exists():
        print(f"Compiling {name}", file=sys.stderr)
        run_process([sys.executable, "benchmarks/measure_truth.py", name, str(path)])
    return json.loads(path.read_text()), gzip.open(path.with_suffix(".gz"), "rt").read()


def case_of(name: str, folder: Path) -> Case:
    """A run, ready to be predicted."""
    row = RUNS[name]
    facts, text = compiled(name, folder)
    target = Target.parse(row.target)
    if row.nic_gbs is not None:
        links = target.chip.links
        far = list(links)[-1]
        target = replace(target, chip=replace(target.chip, links={**links, far: replace(links[far], gbs=row.nic_gbs)}))
    start = name.partition("-")[0]
    return Case(
        target=target,
        hosts=facts["hosts"],
        module=Module.parse(text),
        mesh=facts["mesh"],
        published=row.step_s,
        model_flops=facts["model_flops"],
        fits=facts["fits"],
        # The two run nearly the same program, on the same GPUs.
        family={"maxtext": "maxtext and toolbox", "toolbox": "maxtext and toolbox"}.get(start, start),
        kind="pipeline" if row.is_staged else "several_hosts" if target.num_hosts > 1 else "one_host",
    )


def held_out(cases: Mapping[str, Case], fit: Fit) -> dict[str, float]:
    """The step of each run by the fit of all other families."""
    found: dict[str, float] = {}
    for family in dict.fromkeys(case.family for case in cases.values()):
        constants = fit.of([name for name, case in cases.items() if case.family != family and case.fits])
        found |= {name: case.seconds(constants) for name, case in cases.items() if case.family == family}
    return found


def bound(kind: str, errors: Mapping[str, float], cases: Mapping[str, Case], *, without: str | None = None) -> float:
    """The relative error that 90 % of runs of this kind stay within, if errors are normal in logarithms. without: a family to leave out."""
    squares = {name: error**2 for name, error in errors.items() if cases[name].family != without and cases[name].fits}
    own = [square for name, square in squares.items() if cases[name].kind == kind]
    mean = (sum(own) + _PRIOR_RUNS * sum(squares.values()) / len(squares)) / (len(own) + _PRIOR_RUNS)
    return math.exp(_NORMAL_90 * math.sqrt(mean)) - 1


def ranks(values: Sequence[float]) -> list[int]:
    """The rank of each value."""
    order = sorted(range(len(values)), key=lambda n: values[n])
    return [order.index(n) for n in range(len(values))]


def order_of(predicted: Sequence[float], published: Sequence[float]) -> float:
    """Spearman's coefficient of two lists without equal values."""
    n = len(predicted)
    squares = sum((a - b) ** 2 for a, b in zip(ranks(predicted), ranks(published), strict=True))
    return 1 - 6 * squares / (n * (n**2 - 1))


def measure(cases: Mapping[str, Case]) -> dict[str, Any]:
    """The figures of all runs."""
    published = {name: case.published for name, case in cases.items()}
    fit = Fit(lambda name, constants: cases[name].seconds(constants), published, PRIORS, dict.fromkeys(cases, RUN))
    steps = held_out(cases, fit)
    errors = {name: math.log(steps[name] / published[name]) for name in cases}
    bounds = {name: bound(case.kind, errors, cases, without=case.family) for name, case in cases.items()}
    off = {name: abs(steps[name] / published[name] - 1) for name in cases if cases[name].fits}
    whole = [error for name, error in off.items() if cases[name].kind != "pipeline"]
    rates = [[cases[name].model_flops / seconds[name] for name in off] for seconds in (steps, published)]
    inside = [abs(errors[name]) <= math.log(1 + bounds[name]) for name in off]
    kinds = ("one_host", "several_hosts", "pipeline")
    return {
        "bars": {
            "step, without pipelines": bar(sum(whole) / len(whole), BARS["step, without pipelines"]),
            "step, all": bar(sum(off.values()) / len(off), BARS["step, all"]),
            "order of TFLOP/s": {"value": round(order_of(*rates), 3), "least": LEAST_ORDER},
            "inside the bound": {"value": round(sum(inside) / len(inside), 3), "least": LEAST_INSIDE},
        },
        "constants": {name: round(value, 3) for name, value in fit.of([n for n in cases if cases[n].fits]).items()},
        "error": {kind: round(bound(kind, errors, cases), 2) for kind in kinds},
        "rows": [
            {
                "run": name,
                "published": published[name],
                "step": round(steps[name], 3),
                "error": f"{steps[name] / published[name] - 1:+.0%}",
                "bound": f"{bounds[name]:.0%}",
                "chip file": round(case.seconds(), 3),
                "fits": case.fits,
            }
            for name, case in cases.items()
        ],
    }


def main() -> None:
    """Prints a line for each run and the figures that have a bar, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--folder", default=str(ROOT / "runs" / "truth"), help="where compiled steps are kept (runs/truth)")
    parser.add_argument("--compile-only", action="store_true", help="compile the steps that the folder lacks, and stop")
    arguments = parser.parse_args()
    try:
        cases = {name: case_of(name, Path(arguments.folder)) for name in RUNS}
    except FailedError as error:
        sys.exit(str(error))
    if not arguments.compile_only:
        found = measure(cases)
        figures = [f"{name}: {value}" for part in ("bars", "constants", "error") for name, value in found[part].items()]
        report("truth", found, arguments, [*table(found["rows"]), *figures])


if __name__ == "__main__":
    main()
