"""Device time by signal, from synthetic traces whose every event is known."""

import pytest
from traces import op, plane, planes

from jgt.planner.hlo.origin import NONE
from jgt.planner.hlo.text import Module
from jgt.planner.profile.device_time import OTHER, profile_of
from jgt.planner.profile.events import trace_of

PROGRAM = Module.parse("""HloModule jit_step, is_scheduled=true

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
    """Rows whose times are given in milliseconds."""
    return [(name, int(start * MS), int(duration * MS), stats) for name, start, duration, stats in rows]


def steps(*rows):
    """The host's dispatches, from (step, start, duration) of each."""
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
    gpu = plane(
        "/device:GPU:0",
        {
            "Stream #7(Kernel)": ms(*compute),
            "Stream #9(MemcpyH2D)": ms(*copies),
            "Stream #11(Kernel)": ms(*sends),
            "XLA Ops": ms(("k", 40, 9, op("back"))),
        },
    )
    host = plane("/host:CPU", {"python": steps((4, 0, 1), (5, 20, 26))})
    found = profile_of(trace_of(planes(gpu, host), "train"), PROGRAM, 2, KNOWN)
    # A step takes 40 ms, all of them busy. Between the two steps there are 10 ms; a copy takes one of them.
    assert (found.num_steps, found.step_ms, found.idle_ms, found.between_ms) == (
        2,
        pytest.approx(45),
        pytest.approx(4.5),
        pytest.approx(4.5),
    )
    # The second dispatch ends at 46 ms, 6 ms after the first step; the copy takes one of these.
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
        stats = {"device_ordinal": device}
        lines[f"tf_XLA/{device}"] = ms(
            ("loop", begin, 1, op("loop", **stats, _p=device * 10)),
            ("inner", begin + 2, 1, op("inner", **stats, _p=device * 10 + 1)),
            ("back", begin + 20, 4, op("back", **stats, _p=device * 10 + 2)),
            ("convert", begin + 8, 9, {"hlo_module": "jit_convert", "hlo_op": "back", **stats, "_p": device * 10 + 3}),
        )
        # Another thread ends the instruction, 8 ms after its start. The loop's own event adds nothing to those inside it.
        lines[f"tf_other/{device}"] = ms(
            ("end: inner", begin + 9, 1, {"_c": device * 10 + 1}), ("end: loop", begin + 19, 1, {"_c": device * 10})
        )
    found = profile_of(trace_of(planes(plane("/host:CPU", lines)), "train"), PROGRAM, 1, KNOWN)
    assert [device.device for device in found.devices] == [0, 1]
    assert (found.step_ms, found.idle_ms, found.between_ms) == pytest.approx((22, 3, 0))
    rows = by_signal(found)
    assert (rows["layers/attn"].forward_ms, rows["layers/attn"].backward_ms, rows[OTHER].exposed_ms) == pytest.approx((8, 4, 7))


def test_instructions_without_a_signal_have_a_row():
    events = ms(("k", 0, 3, op("random", kernel_details="")), ("k", 3, 1, op("back", kernel_details="")))
    found = profile_of(trace_of(planes(plane("/device:GPU:1", {"Stream #1(Kernel)": events})), "train"), PROGRAM, 1, KNOWN)
    assert by_signal(found)[NONE].share == pytest.approx(3 / 4)
    assert found.devices[0].device == 1


def test_a_trace_without_the_program_has_no_profile():
    other = plane("/device:GPU:0", {"Stream #1(Kernel)": ms(("k", 0, 3, {"hlo_module": "jit_other", "hlo_op": "x"}))})
    assert profile_of(trace_of(planes(other), "train"), PROGRAM, 1, KNOWN) is None
