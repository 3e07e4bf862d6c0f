"""The times of layers, from traces whose every event is known, and from a run."""

import pytest

from jgt.planner.hlo.text import Module
from jgt.planner.profile.events import Event, Trace
from jgt.planner.profile.layers import PipelineTimes, StageOfLayers
from jgt.schedule.schedules import schedule_table

PROGRAM = Module.parse("""HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %warm = f32[4]{0} negate(%x), metadata={op_name="jit(step)/sig.layers/a"}
  %first = f32[4]{0} negate(%warm), metadata={op_name="jit(step)/sig.layers/a"}
  %often = f32[4]{0} negate(%first), metadata={op_name="jit(step)/sig.layers/sig.mlp/b"}
  %back = f32[4]{0} negate(%often), metadata={op_name="jit(step)/jgt.backward/sig.layers/a"}
  %drain = f32[4]{0} negate(%back), metadata={op_name="jit(step)/jgt.backward/sig.layers/a"}
  %sent = f32[4]{0} negate(%drain), metadata={op_name="jit(step)/jgt.pipeline/a"}
  %head = f32[4]{0} negate(%sent), metadata={op_name="jit(step)/sig.head/a"}
  ROOT %update = f32[4]{0} negate(%head), metadata={op_name="jit(step)/sig.optimizer/a"}
}
""")
MICROBATCHES, HEAVY, MS = 3, 1, 1e6


class Clock:
    """The events of one device, one after another."""

    def __init__(self, device):
        self.device, self.now, self.events = device, 0.0, []

    def run(self, name, ms, times=1):
        for _ in range(times):
            self.events.append(
                Event(device=self.device, program="jit_step", instruction=name, start_ns=self.now, end_ns=self.now + ms * MS)
            )
            self.now += ms * MS


def stages(sizes):
    """The stages of a 1f1b of two stages, with a device each."""
    table, found, begin = schedule_table("1f1b", 2, MICROBATCHES, None), {}, 0
    for stage, size in enumerate(sizes):
        counts = {"forward": table.counts(stage, "F"), "backward": table.counts(stage, "B")}
        found[stage] = StageOfLayers(stage=stage, layers=range(begin, begin + size), most=max(sizes), **counts)
        begin += size
    return table, found


def trace(table, devices, *, skips, steps=2):
    """A trace in which layer HEAVY runs an instruction three times. skips: stages skip what they have no item for."""
    events = []
    for device, stage in devices.items():
        clock = Clock(device)
        for _ in range(steps):
            for segment, (kinds, ticks) in enumerate(table.segments):
                for tick in ticks:
                    layers = [*stage.layers, *[None] * (0 if skips else stage.most - len(stage.layers))]
                    for kind in kinds:
                        if skips and table.rows(kind)[tick][stage.stage] is None:
                            continue
                        for layer in layers if kind == "F" else reversed(layers):
                            if kind == "F":
                                clock.run("warm" if segment == 0 else "first", 1 + stage.stage)
                                clock.run("often", 2, 3 if layer == HEAVY else 1)
                            else:
                                clock.run("back" if segment == 1 else "drain", 4)
                    # Sends and the waits for them belong to no layer.
                    clock.run("sent", 50)
                    clock.run("head", 0.5)
            clock.run("update", 7)
        events += clock.events
    return Trace(events=tuple(events), dispatched={})


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (3, 1)])
def test_each_layer_has_its_time(sizes, skips):
    table, devices = stages(sizes)
    times = PipelineTimes(signal="layers", microbatches=MICROBATCHES, parts=1, by_stage=False, devices=devices)
    found = times.of(trace(table, devices, skips=skips), PROGRAM, 2)
    assert [row.layer for row in found.layers] == [0, 1, 2, 3]
    for row in found.layers:
        assert row.stage == (row.layer >= sizes[0])
        assert row.forward_ms == 1 + row.stage + 2 * (3 if row.layer == HEAVY else 1)
        assert row.backward_ms == 4
    # Every tick has a head here. The optimizer runs once a step, so it does not count.
    assert found.ends_ms == pytest.approx(0.5 * table.num_ticks / MICROBATCHES)


def test_a_recompute_by_stage_takes_as_long_as_forward():
    table, devices = stages((2, 2))
    times = PipelineTimes(signal="layers", microbatches=MICROBATCHES, parts=2, by_stage=True, devices=devices)
    found = times.of(trace(table, devices, skips=True, steps=4), PROGRAM, 2)
    assert {row.backward_ms - row.forward_ms for row in found.layers} == {4}


def test_a_trace_with_other_counts_has_no_times():
    table, devices = stages((2, 2))
    times = PipelineTimes(signal="layers", microbatches=MICROBATCHES, parts=1, by_stage=False, devices=devices)
    whole = trace(table, devices, skips=True)
    assert times.of(Trace(events=whole.events[:-9], dispatched={}), PROGRAM, 2) is None
    assert times.of(Trace(events=(), dispatched={}), PROGRAM, 2) is None
