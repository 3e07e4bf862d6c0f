"""A run at this moment as metrics for Prometheus: its numbers once for a run, and those of its processes by process and host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...journal.members import ProcessStatus
from ...journal.openmetrics import MetricFamily, MetricSample
from ..top.view import RunView

_KNOWN = {
    "loss": ("jgt_loss", "loss of the last logged step"),
    "eval_loss": ("jgt_eval_loss", "loss of the last evaluation"),
    "grad_norm": ("jgt_grad_norm", "norm of the last logged step's gradient"),
    "lr": ("jgt_learning_rate", "learning rate of the last logged step"),
    "step_time_s": ("jgt_step_seconds", "seconds of a step, over the last logged ones"),
    "tokens_per_s": ("jgt_tokens_per_second", "tokens in a second, over the last logged steps"),
    "samples_per_s": ("jgt_samples_per_second", "samples in a second, over the last logged steps"),
    "mfu": ("jgt_mfu_ratio", "share of the devices' peak FLOP/s that the model uses"),
    "tokens": ("jgt_tokens", "tokens of training so far; a restart takes them back to its checkpoint"),
}
_ELSEWHERE = {"step", "time", "samples", "memory_bytes", "memory_peak_bytes", "memory_limit_bytes"}
_STATES = ("runs", "ended", "silent", "killed", "suspended")


def of_run(view: RunView) -> Iterator[MetricFamily]:
    """The metrics of a run as a whole."""
    labels = {"run": view.name}

    def family(name: str, text: str, value: float | None, kind: str = "gauge") -> MetricFamily:
        samples = () if value is None else (MetricSample(value, labels, "_total" if kind == "counter" else ""),)
        return MetricFamily(name=name, text=text, kind=kind, samples=samples)

    yield family("jgt_step", "the last finished step", view.step)
    yield family("jgt_last_step", "the step at which the run ends", view.total)
    yield family("jgt_left_seconds", "seconds until then, by the wall time of the last logged steps", view.eta_s)
    yield family("jgt_goodput_ratio", "share of wall time in steps that count", view.goodput)
    yield family("jgt_restarts", "restarts", max(0, view.starts - 1), "counter")
    yield family("jgt_skipped_updates", "updates that were not applied", view.skipped, "counter")
    ends = tuple(MetricSample(count, labels | {"reason": reason}) for reason, count in view.restarts_after.items())
    yield MetricFamily(name="jgt_ends", text="starts that were followed by another, by how they ended", samples=ends)
    causes = tuple(MetricSample(seconds, labels | {"cause": cause}) for cause, seconds in view.causes.items())
    yield MetricFamily(name="jgt_wall_seconds", text="wall time by cause, as jgt report has it", samples=causes)
    for metric, (name, text) in _KNOWN.items():
        yield family(name, text, view.last(metric))
    own = dict.fromkeys(name for row in view.rows for name in row if name not in _KNOWN and name not in _ELSEWHERE)
    values = tuple(MetricSample(value, labels | {"metric": name}) for name in own if (value := view.last(name)) is not None)
    yield MetricFamily(name="jgt_metric", text="the last value of any other metric, by name", samples=values)


def of_processes(view: RunView, members: Sequence[ProcessStatus]) -> Iterator[MetricFamily]:
    """The metrics of processes."""
    labels = {m.process: {"run": view.name, "process": str(m.process), "host": m.host} for m in members}

    def family(name: str, text: str, values: Iterator[tuple[ProcessStatus, float | None, dict[str, str]]]) -> MetricFamily:
        samples = tuple(MetricSample(value, labels[m.process] | more) for m, value, more in values if value is not None)
        return MetricFamily(name=name, text=text, samples=samples)

    def simple(name: str, text: str, attribute: str) -> MetricFamily:
        return family(name, text, ((m, getattr(m, attribute), {}) for m in members))

    states = ((m, float(m.state == state), {"state": state}) for m in members for state in _STATES)
    yield family("jgt_process_state", "1 for the state of the process, and 0 for all others", states)
    yield family("jgt_process_phase_seconds", "seconds in the present phase", ((m, m.since_s, {"phase": m.phase}) for m in members))
    yield simple("jgt_process_step", "the last step that the process has begun", "step")
    yield simple("jgt_process_status_age_seconds", "seconds since its last word", "age_s")
    yield simple("jgt_process_idle_seconds", "seconds without progress", "idle_s")
    yield simple("jgt_process_idle_limit_seconds", "seconds without progress after which its watchdog ends it", "limit_s")
    shares = ((m, share, {"part": part}) for m in members for part, share in zip(("data", "host", "device"), m.shares or (), strict=False))
    yield family("jgt_process_share_ratio", "share of a step in which the host reads data, works itself, or waits for its devices", shares)
    slower = ((m, m.slower or 1.0, {"cause": m.cause or "none"}) for m in members)
    yield family("jgt_process_straggler_ratio", "factor by which the process holds up the others; 1: not at all", slower)
    yield simple("jgt_process_power_watts", "power of its GPUs", "power_w")
    yield family("jgt_process_slowed", "1 while a driver slows its GPUs", ((m, 1.0, {"reason": m.slowed}) for m in members if m.slowed))
    for n, (name, text) in enumerate((("bytes", "bytes in use"), ("limit_bytes", "bytes available"))):
        memory = ((m, pair[n], {"device": str(device)}) for m in members for device, pair in enumerate(m.memory))
        yield family(f"jgt_device_memory_{name}", f"{text} on a device, by its number in the process", memory)
