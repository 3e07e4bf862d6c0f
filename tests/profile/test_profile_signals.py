"""Device time by signal from traces that are made up: what each event counts for."""

import pytest
from traces import op, plane, planes

from jgt.plan.hlo import Module
from jgt.plan.origin import NONE
from jgt.profile.events import trace_of
from jgt.profile.signals import OTHER, profile

PROGRAM = Module.of("""HloModule jit_step, is_scheduled=true

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %inner = f32[4]{0} negate(%p), metadata={op_name="jit(step)/jvp(sig.layers)/while/body/sig.attn/neg"}
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %loop = f32[4]{0} while(%x), body=%body, metadata={op_name="jit(step)/jvp(sig.layers)/while"}
  %again = f32[4]{0} negate(%loop), metadata={op_name="jit(step)/sig.layers/rematted_computation/sig.attn/neg"}
  %back = f32[4]{0} negate(%again), metadata={op_name="jit(step)/transpose(jvp(sig.layers))/sig.attn/neg"}
  %start = f32[4]{0} all-reduce-start(%back), replica_groups={{0,1}}, to_apply=%sum, metadata={op_name="jit(step)/sig.optimizer/psum"}
  %hoisted = f32[4]{0} negate(%back), metadata={op_name="jit(step)/sig.attn/neg"}
  %random = f32[4]{0} custom-call(), custom_call_target="random"
  ROOT %done = f32[4]{0} all-reduce-done(%start), metadata={op_name="jit(step)/sig.optimizer/psum"}
}
""")
KNOWN = {"layers/attn"}
MS = 1_000_000


def ms(*rows):
    """Rows in milliseconds."""
    return [(name, int(start * MS), int(duration * MS), stats) for name, start, duration, stats in rows]


def steps(*rows):
    """The host's side: (step, start, duration) of each call."""
    return ms(*(("train", start, duration, {"step_num": step}) for step, start, duration in rows))


def by_signal(found):
    return {row.signal: row for row in found.signals}


def test_two_steps_on_a_gpu():
    kernel = {"kernel_details": "regs:1"}
    compute, copies, sends = [], [], []
    for begin in (0, 50):
        compute += [
            ("k", begin, 10, op("inner", **kernel)),
            ("k", begin + 10, 10, op("inner", **kernel)),
            ("k", begin + 20, 4, op("again", **kernel)),
            ("k", begin + 24, 6, op("back", **kernel)),
            ("k", begin + 32, 2, op("hoisted", **kernel)),
        ]
        sends += [("nccl", begin + 30, 10, op("start", **kernel))]
    copies += [("MemcpyH2D", 44, 1, {"memcpy_details": "size:4"}), ("MemcpyH2D", 15, 1, {"memcpy_details": "size:4"})]
    gpu = plane("/device:GPU:0", {"Stream #7(Kernel)": ms(*compute), "Stream #9(MemcpyH2D)": ms(*copies), "Stream #11(Kernel)": ms(*sends), "XLA Ops": ms(("k", 40, 9, op("back")))})
    host = plane("/host:CPU", {"python": steps((4, 0, 1), (5, 20, 26))})
    found = profile(trace_of(planes(gpu, host), "train"), PROGRAM, 2, KNOWN)
    # A step takes 40 ms, of which all are busy; between two there are 10, of which a copy takes 1.
    assert (found.num_steps, found.step_ms, found.idle_ms, found.between_ms) == (2, pytest.approx(45), pytest.approx(4.5), pytest.approx(4.5))
    # The second call ends at 46, 6 ms after the first step has ended, one of them the copy's.
    assert found.late_ms == pytest.approx(2.5)
    rows = by_signal(found)
    assert rows.keys() == {"layers/attn", "optimizer", OTHER}
    attn, optimizer, other = rows["layers/attn"], rows["optimizer"], rows[OTHER]
    assert (attn.forward_ms, attn.backward_ms, attn.recompute_ms) == pytest.approx((22, 6, 4))
    assert (optimizer.collectives_ms, optimizer.exposed_ms) == pytest.approx((10, 8))
    assert other.exposed_ms == pytest.approx(0.5)
    assert sum(row.share for row in found.signals) + found.idle_ms / found.step_ms == pytest.approx(1)


def test_a_step_on_two_cpu_devices():
    lines = {}
    for device, begin in ((0, 0), (1, 5)):
        told = {"device_ordinal": device}
        lines[f"tf_XLA/{device}"] = ms(
            ("loop", begin, 1, op("loop", **told, _p=device * 10)),
            ("inner", begin + 2, 1, op("inner", **told, _p=device * 10 + 1)),
            ("back", begin + 20, 4, op("back", **told, _p=device * 10 + 2)),
            ("convert", begin + 8, 9, {"hlo_module": "jit_convert", "hlo_op": "back", **told, "_p": device * 10 + 3}),
        )
        # What one thread began another ends, 8 ms after its begin; the loop is not more than what runs in it.
        lines[f"tf_other/{device}"] = ms(("end: inner", begin + 9, 1, {"_c": device * 10 + 1}), ("end: loop", begin + 19, 1, {"_c": device * 10}))
    found = profile(trace_of(planes(plane("/host:CPU", lines)), "train"), PROGRAM, 1, KNOWN)
    assert [device.device for device in found.devices] == [0, 1]
    assert (found.step_ms, found.idle_ms, found.between_ms) == pytest.approx((22, 3, 0))
    rows = by_signal(found)
    assert (rows["layers/attn"].forward_ms, rows["layers/attn"].backward_ms, rows[OTHER].exposed_ms) == pytest.approx((8, 4, 7))


def test_what_is_under_no_signal_has_a_row():
    events = ms(("k", 0, 3, op("random", kernel_details="")), ("k", 3, 1, op("back", kernel_details="")))
    found = profile(trace_of(planes(plane("/device:GPU:1", {"Stream #1(Kernel)": events})), "train"), PROGRAM, 1, KNOWN)
    assert by_signal(found)[NONE].share == pytest.approx(3 / 4)
    assert found.devices[0].device == 1


def test_a_trace_without_the_program_has_no_profile():
    other = plane("/device:GPU:0", {"Stream #1(Kernel)": ms(("k", 0, 3, {"hlo_module": "jit_other", "hlo_op": "x"}))})
    assert profile(trace_of(planes(other), "train"), PROGRAM, 1, KNOWN) is None
