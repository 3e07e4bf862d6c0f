"""The time from launch to the end of the first step, with an empty compile cache and with a warm one.

    python benchmarks/startup.py [--json] [--save] [--pairs 3] [--config FILE ...]

Each pair of launches has its own cache (`xla.cache`, in a temporary folder). The first launch finds it empty; the second reads what the
first stored. Seconds and CPU-seconds are those of the whole process and its children, from launch to the first line of metrics.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, FailedError, Sample, bar, compared, make_parser, report, run_process

CONFIGS = ("configs/quickstart.yaml", "benchmarks/step.yaml")
MOST = 0.5
"""The bar: the second launch may take at most this share of the first."""


def main() -> None:
    """Launches the pairs and prints the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--config", nargs="+", default=CONFIGS)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of launches, with an empty and with a warm cache")
    arguments = parser.parse_args()
    try:
        found = {config: measured(config, arguments.pairs) for config in arguments.config}
    except FailedError as error:
        sys.exit(str(error))
    report("startup", found, arguments)


def measured(config: str, pairs: int) -> dict[str, Any]:
    """The figures of one config. A launch before the first pair reads the data from disk and does not count."""
    samples: dict[str, list[Sample]] = {"warm": [], "cold": []}
    with tempfile.TemporaryDirectory() as folder:
        launch(config, Path(folder), "before")
        for index in range(pairs):
            for kind in ("cold", "warm"):
                samples[kind].append(launch(config, Path(folder), f"cache{index}"))
    found = compared(samples)
    found["bars"] = {f"warm to cold, {kind}": bar(found[f"{kind}_ratio"]["median"], MOST) for kind in ("s", "cpu_s")}
    return found


def launch(config: str, folder: Path, cache: str) -> Sample:
    """Measures a run to the end of its first step, in its own run directory."""
    places = [f"run.dir={tempfile.mkdtemp(dir=folder)}", f"xla.cache={folder / cache}"]
    return run_process([sys.executable, "-m", "benchmarks.first_step", "--config", str(ROOT / config), *places])


if __name__ == "__main__":
    main()
