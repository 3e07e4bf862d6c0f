"""Programs that were run: their compiled text, and how long a run takes.

All devices run at once, as in training: devices that share a processor are slower together than alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax

from jgt.hardware.chip import Chip, Target
from jgt.hardware.network import Network
from jgt.hlo.text import Module
from jgt.planner.timeline import Timeline

_LEAST, _MOST = 2, 25
_SECONDS = 0.5
"""In a round, a program runs once without being timed, then `_LEAST` times, then until these seconds are over, at most `_MOST` times."""
ROUNDS = 4
"""A machine with other work is slow for seconds or minutes: rounds are far apart, and the fastest one counts."""

RunOnce = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program. kind: what it is about, such as matmul or step. begin: allocates its arguments, and returns what runs it once."""

    name: str
    kind: str
    compiled: jax.stages.Compiled
    mesh: Mapping[str, int]
    begin: Callable[[], RunOnce]

    def seconds(self) -> float:
        """The median of a round of runs."""
        run = self.begin()
        jax.block_until_ready(run())
        samples: list[float] = []
        began = time.perf_counter()
        while len(samples) < _LEAST or (len(samples) < _MOST and time.perf_counter() - began < _SECONDS):
            start = time.perf_counter()
            jax.block_until_ready(run())
            samples.append(time.perf_counter() - start)
        return statistics.median(samples)


class Measured:
    """A program and its time. rounds: the seconds of a run by each round."""

    def __init__(self, program: Program, rounds: Sequence[float]):
        self.name, self.kind, self.rounds = program.name, program.kind, rounds
        self._num_devices = math.prod(program.mesh.values())
        stats = program.compiled.memory_analysis()
        self._temp_bytes = 0 if stats is None else stats.temp_size_in_bytes
        self._timeline = Timeline(Module.parse(program.compiled.as_text() or ""), program.mesh, self._num_devices, None)

    @property
    def seconds(self) -> float:
        """Of the fastest round."""
        return min(self.rounds)

    def predicted(self, chip: Chip) -> float:
        """The seconds of a run on devices with these figures."""
        target = Target(chip=chip, text=chip.name, num_hosts=1, per_host=self._num_devices)
        timeline = self._timeline.on(Network(target=target, hosts=[0] * self._num_devices))
        return timeline.step(self._temp_bytes).seconds


def measure(programs: Iterable[Program], say: Callable[[str], None]) -> list[Measured]:
    """Takes the times of programs. say: prints a line for each; the programs are compiled before their first round."""
    compiled: list[Program] = []
    rounds: dict[str, list[float]] = {}
    began = time.monotonic()
    for number in range(1, ROUNDS + 1):
        for program in programs if number == 1 else compiled:
            if number == 1:
                compiled.append(program)
            seconds = program.seconds()
            rounds.setdefault(program.name, []).append(seconds)
            say(f"[{time.monotonic() - began:4.0f} s] round {number} of {ROUNDS} {seconds * 1e3:10.2f} ms  {program.kind}: {program.name}")
    return [Measured(program, rounds[program.name]) for program in compiled]
