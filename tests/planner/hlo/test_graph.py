"""Values keep their origin on their way through loops, from where they are computed and to where they are used."""

from jgt.planner.hlo.collectives import collectives
from jgt.planner.hlo.text import Module

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


# A pipelined loop, as of a scan over layers: each iteration gathers the weights of the next one.
AHEAD = """HloModule jit_step, is_scheduled=true

%body (state: (s32[], f32[8,8], f32[8,8], f32[4,8])) -> (s32[], f32[8,8], f32[8,8], f32[4,8]) {
  %state = (s32[], f32[8,8], f32[8,8], f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,8] get-tuple-element(%state), index=1
  %weights = f32[8,8] get-tuple-element(%state), index=2
  %shard = f32[4,8] get-tuple-element(%state), index=3
  %attn = f32[8,8] add(%x, %x), metadata={op_name="sig.layers/sig.attn/add"}
  %mlp = f32[8,8] add(%attn, %weights), metadata={op_name="sig.layers/sig.mlp/add"}
  %ahead = f32[8,8] all-gather(%shard), channel_id=1, replica_groups=[1,2]<=[2], dimensions={0}, metadata={op_name="sig.layers/squeeze"}
  ROOT %next = (s32[], f32[8,8], f32[8,8], f32[4,8]) tuple(%i, %mlp, %ahead, %shard)
}

%more (state.1: (s32[], f32[8,8], f32[8,8], f32[4,8])) -> pred[] {
  %state.1 = (s32[], f32[8,8], f32[8,8], f32[4,8]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (input: f32[8,8], stored: f32[4,8]) -> f32[8,8] {
  %input = f32[8,8] parameter(0)
  %stored = f32[4,8] parameter(1)
  %zero = s32[] constant(0)
  %first = f32[8,8] all-gather(%stored), channel_id=2, replica_groups=[1,2]<=[2], dimensions={0}, metadata={op_name="sig.layers/squeeze"}
  %start = (s32[], f32[8,8], f32[8,8], f32[4,8]) tuple(%zero, %input, %first, %stored)
  %loop = (s32[], f32[8,8], f32[8,8], f32[4,8]) while(%start), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"11"}}
  %last = f32[8,8] get-tuple-element(%loop), index=1
  ROOT %end = f32[8,8] add(%last, %last), metadata={op_name="sig.layers/sig.attn/add"}
}
"""


def test_an_element_of_a_loop_is_used_in_the_next_iteration():
    found = collectives(Module.parse(AHEAD), {"data": 2}, 2)
    assert [(c.signal, c.count) for c in found] == [("layers/mlp", 12)]


def test_bitcasts_do_not_count_as_hops():
    chain = "".join(f"  %b{n + 1} = f32[8,8] bitcast(%b{n})\n" for n in range(9))
    text = f"""HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (input: f32[8,8]) -> f32[8,8] {{
  %input = f32[8,8] parameter(0)
  %b0 = f32[8,8] add(%input, %input), metadata={{op_name="jit(step)/sig.mlp/add"}}
{chain}  ROOT %end = f32[8,8] all-reduce(%b9), channel_id=2, replica_groups=[1,2]<=[2], to_apply=%add
}}
"""
    assert [c.signal for c in collectives(Module.parse(text), {"data": 2}, 2)] == ["mlp"]
