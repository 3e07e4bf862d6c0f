"""The run itself: start or resume, steps, evaluations, checkpoints, a sample at the end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jgt.document import collect
from train.agree import agree
from train.checkpoint import Checkpoints, Identity, SaveError
from train.clock import InFlight, StepClock
from train.config import Run
from train.console import Screen
from train.data.batches import Data, open_data
from train.feed import Feed
from train.flops import flops_per_token, peak_flops
from train.folder import check_data, config_fingerprint, write_folder
from train.guard import Done, Guard
from train.optimizer import build_schedule
from train.records import Records
from train.sample import sample_text
from train.setup import Setup, prepare
from train.step import State


def train(run: Run) -> None:
    """Trains until `train.steps`, from the newest checkpoint if there is one. Raises InputError for wrong input."""
    config = run.config
    first = jax.process_index() == 0
    screen = Screen(enabled=first)
    setup, data = open_run(run)
    if first:
        write_folder(run, data.fingerprint)
    screen.setup(setup)
    screen.say("Data: " + ", ".join(f"{key} {value}" for key, value in data.fingerprint.items()))
    records = Records(config.run.path, enabled=first)
    identity = Identity(mesh=dict(setup.mesh.shape), fingerprints={"config": config_fingerprint(run), "data": dict(data.fingerprint)})
    checkpoints = Checkpoints(config.run.path / "checkpoints", config.checkpoint, identity)
    try:
        Loop(setup, data, screen, records, checkpoints).run()
    except (Exception, KeyboardInterrupt):
        print(f"jgt: the run failed; {checkpoints.describe()}", file=sys.stderr)
        raise
    finally:
        screen.stop_steps()
        records.close()
        checkpoints.close()


def open_run(run: Run) -> tuple[Setup, Data]:
    """The program and the data. Raises InputError with what is wrong with either."""
    config = run.config
    problems: list[str] = []
    setup = data = None
    with collect(problems):
        setup = prepare(run)
    in_data: list[str] = []
    with collect(in_data):
        cache = config.run.path / "data"
        data = open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=config.run.seed, cache_dir=cache)
    problems += [f"{run.where('data')}: {problem}" for problem in in_data]
    if data is not None and jax.process_index() == 0:
        with collect(problems):
            check_data(run, data.fingerprint)
    agree(problems, (run.resolved(), None if data is None else data.fingerprint))
    assert setup is not None and data is not None
    return setup, data


class Loop:
    """One run over an open directory; owns the state while it is trained."""

    def __init__(self, setup: Setup, data: Data, screen: Screen, records: Records, checkpoints: Checkpoints):
        self._setup, self._data = setup, data
        self._screen, self._records, self._checkpoints = screen, records, checkpoints
        self._config = setup.run.config
        self._feed = Feed(data, setup.batch_shardings, self._config.train.batch, self._config.model.seq)
        self._schedule: Callable[[int], Any] = build_schedule(self._config.optimizer, self._config.train.steps)
        self._eval_step: Any = None

    def run(self) -> None:
        """Start or resume, train, and show a sample."""
        state, step, samples = self._start()
        if step >= self._config.train.steps:
            self._screen.say(f"Already at step {step} of {self._config.train.steps}; to go on, raise it: train.steps={step * 2}")
        else:
            state = self._steps(state, step, samples)
        if self._config.sample.tokens:
            text = sample_text(self._setup, state, self._data)
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
            self._records.text("sample.txt", text)
            self._screen.say(f"Sample (temperature {self._config.sample.temperature}):\n{shown}")

    def _start(self) -> tuple[State, int, int]:
        """The state to begin with, the steps done and the sequences of training data consumed."""
        with self._records.phase("verify"):
            found, reports = self._checkpoints.find()
        for report in reports:
            print(f"jgt: {report}", file=sys.stderr)
        self._records.forget_after(0 if found is None else found.step)
        if found is None:
            with self._records.phase("init"):
                state = jax.block_until_ready(self._setup.init())
            return state, 0, 0
        with self._records.phase("restore", step=found.step):
            state = self._checkpoints.restore(found, self._setup.shapes, self._setup.shardings)
        self._screen.say(f"Resumed from step {found.step} in {self._config.run.path}")
        return state, found.step, found.samples

    def _steps(self, state: State, done: int, samples: int) -> State:
        config = self._config.train
        with self._records.phase("compile"):
            train_step = self._setup.compile_train_step()
        self._screen.start_steps(done, config.steps)
        clock = StepClock(done)
        begun = time.time()
        in_flight, guard = InFlight(), Guard(config, self._records, enabled=jax.process_index() == 0)
        for step, batch in zip(range(done + 1, config.steps + 1), self._feed.train(samples), strict=False):
            state, metrics = train_step(state, batch)
            guard.check(in_flight.add(Done(step=step, samples=(samples, samples + config.batch - 1), metrics=metrics)))
            samples += config.batch
            if step % config.log_every == 0 or step == config.steps:
                self._log(step, jax.device_get(metrics), clock)
            if self._due(step, config.eval_every) and self._data.has_eval:
                jax.block_until_ready(metrics)
                with clock.paused():
                    self._evaluate(state, step)
            if self._due(step, self._config.checkpoint.every):
                for finished in in_flight.rest():
                    guard.check(finished)
                with clock.paused(), self._records.phase("save", step=step), self._saving(step):
                    self._checkpoints.save(state, step, samples)
            with self._saving(step):
                self._checkpoints.poll()
        self._records.event("step", begun, clock.total, steps=config.steps - done)
        with self._records.phase("save", step=config.steps):
            self._checkpoints.wait()
        self._screen.stop_steps()
        self._screen.say(f"Checkpoint of step {config.steps} in {self._config.run.path / 'checkpoints'}")
        return state

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """A save may fail: it is told, and training goes on; the last one may not."""
        try:
            yield
        except SaveError as error:
            if step == self._config.train.steps:
                raise
            self._records.event("save_failed", time.time(), 0.0, step=step, why=str(error))
            print(f"jgt: a checkpoint could not be saved: {error}. Training goes on; {self._checkpoints.describe()}", file=sys.stderr)

    def _due(self, step: int, every: int) -> bool:
        return step == self._config.train.steps or (every > 0 and step % every == 0)

    def _log(self, step: int, metrics: dict[str, Any], clock: StepClock) -> None:
        seconds = clock.lap(step)
        row = {
            "loss": float(metrics["loss"]),
            "grad_norm": float(metrics["grad_norm"]),
            "lr": float(self._schedule(step - 1)),
            "step_time_s": seconds,
            **self._speed(seconds),
        }
        self._records.metrics(step, row)
        self._screen.step(step, self._config.train.steps, row)

    def _speed(self, seconds: float | None) -> dict[str, float | None]:
        if seconds is None:
            return {"tokens_per_s": None, "mfu": None}
        tokens = self._config.train.batch * self._config.model.seq / seconds
        peak = peak_flops(jax.devices()[0].device_kind)
        flops = tokens * flops_per_token(self._config.model, self._setup.num_parameters)
        return {"tokens_per_s": tokens, "mfu": flops / (peak * self._setup.mesh.size) if peak else None}

    def _evaluate(self, state: State, step: int) -> None:
        """Token-weighted mean over the held-out split, nats per token."""
        if self._eval_step is None:
            with self._records.phase("compile", what="evaluation"):
                self._eval_step = self._setup.compile_eval_step()
        with self._records.phase("eval", step=step):
            sums, in_flight = [], InFlight()
            for batch in self._feed.evaluation(self._config.train.eval_batches):
                sums.append(self._eval_step(state.params, batch))
                in_flight.add(sums[-1])
            nats, weights = (float(sum(jax.device_get(part))) for part in zip(*sums, strict=True))
        row = {"eval_loss": nats / weights}
        self._records.metrics(step, row)
        self._screen.step(step, self._config.train.steps, row)
