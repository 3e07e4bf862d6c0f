"""jgt's own training loop with the time of each step: runs `python -m train` until the last step is logged.

`python jgt_train.py --config FILE [key.sub=value ...]` prints JSON: CPU-seconds and seconds from launch to the end of the first step, and
of each step after it.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from typing import Any

from step_clock import StepClock

from train.__main__ import garbage_collection_paused
from train.__main__ import main as run
from train.config import Run

with garbage_collection_paused():
    # The command also pauses garbage collection during these imports.
    import train.run.train
    from train.records.records import Records
    from train.setup import Setup


def main() -> None:
    """Trains, and exits right after the last step, because the rest is not part of the measurement."""
    clock = StepClock()
    setups: list[Setup] = []
    prepare, log = train.run.train.prepare, Records.metrics

    def prepared(run: Run, **options: Any) -> Setup:
        setups.append(prepare(run, **options))
        return setups[-1]

    def timed(records: Records, step: int, values: dict[str, Any]) -> None:
        log(records, step, values)
        clock.tick()
        config = setups[0].run.config
        if step == config.train.steps:
            found = clock.found() | {"parameters": setups[0].num_parameters, "tokens_a_step": config.train.batch * config.model.seq}
            versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
            print(json.dumps(found | {"loss": values["loss"], "versions": versions}), flush=True)
            os._exit(0)

    train.run.train.prepare, Records.metrics = prepared, timed
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
