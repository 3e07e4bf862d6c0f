"""Values keep their origin on their way through loops."""

from jgt.hlo.collectives import collectives
from jgt.hlo.text import Module

# A pipelined loop: each iteration reduces the gradients that the iteration before has computed.
TEXT = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[8,8], f32[8,8])) -> (s32[], f32[8,8], f32[8,8]) {
  %state = (s32[], f32[8,8], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %first = f32[8,8] get-tuple-element(%state), index=1
  %second = f32[8,8] get-tuple-element(%state), index=2
  %reduced = (f32[8,8], f32[8,8]) all-reduce(%first, %second), channel_id=1, replica_groups=[1,2]<=[2], to_apply=%add
  %attn = f32[8,8] add(%first, %second), metadata={op_name="jit(step)/sig.attn/add"}
  %mlp = f32[8,8] add(%second, %first), metadata={op_name="jit(step)/sig.mlp/add"}
  ROOT %next = (s32[], f32[8,8], f32[8,8]) tuple(%i, %attn, %mlp)
}

%condition (state.1: (s32[], f32[8,8], f32[8,8])) -> pred[] {
  %state.1 = (s32[], f32[8,8], f32[8,8]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (input: f32[8,8]) -> f32[8,8] {
  %input = f32[8,8] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,8], f32[8,8]) tuple(%zero, %input, %input)
  %loop = (s32[], f32[8,8], f32[8,8]) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %last = f32[8,8] get-tuple-element(%loop), index=2
  ROOT %end = f32[8,8] all-reduce(%last), channel_id=2, replica_groups=[1,2]<=[2], to_apply=%add
}
"""


def test_an_element_of_a_loop_comes_from_the_iteration_before():
    found = collectives(Module.parse(TEXT), {"data": 2}, 2)
    assert [(c.signal, c.count) for c in found] == [("mlp", 13), ("attn", 12)]
