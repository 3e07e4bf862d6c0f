"""Branches count as always taken, or as often as their names say."""

import pytest

from jgt.planner.hlo.collectives import collectives
from jgt.planner.hlo.text import Module
from jgt.planner.timeline import Timeline

TEXT = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%taken (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %dot = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/NAMEsig.head/dot_general"}
  ROOT %ar = f32[8,8] all-reduce(%dot), channel_id=1, replica_groups=[1,2]<=[2], use_global_device_ids=true, to_apply=%add
}

%skipped (q: f32[8,8]) -> f32[8,8] {
  ROOT %q = f32[8,8] parameter(0)
}

%body (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %on = pred[] constant(true)
  ROOT %chosen = f32[8,8] conditional(%on, %x, %x), true_computation=%taken, false_computation=%skipped
}

%condition (y: f32[8,8]) -> pred[] {
  %y = f32[8,8] parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (input: f32[8,8]) -> f32[8,8] {
  %input = f32[8,8] parameter(0)
  ROOT %loop = f32[8,8] while(%input), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
}
"""


@pytest.mark.parametrize(("name", "times"), [("", 12), ("jgt.taken.2of3/", 8), ("jgt.taken.1of2/jgt.taken.1of3/", 2)])
def test_branches_count_as_often_as_they_are_taken(name, times):
    module = Module.parse(TEXT.replace("NAME", name))
    (one,) = collectives(module, {"data": 2}, 2)
    assert (one.signal, one.count, one.bytes) == ("head", times, 8 * 8 * 4)
    assert Timeline(module, {"data": 2}, 2, None).step().num_flops == times * 2 * 8**3
