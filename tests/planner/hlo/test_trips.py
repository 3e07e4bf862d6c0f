"""How often loops run whose count XLA does not write."""

import pytest

from jgt.planner.hlo.shares import possible_rounds
from jgt.planner.hlo.text import Module
from jgt.planner.hlo.trips import trip_count, unknown_loops

TEXT = """HloModule jit_step, is_scheduled=true

%next (before: s32[]) -> s32[] {
  %before = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %after = s32[] add(%before, %two)
}

%less (counter: s32[]) -> pred[] {
  %counter = s32[] parameter(0)
  %limit = s32[] constant(LIMIT)
  ROOT %compared = pred[] compare(%counter, %limit), direction=LT
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8] get-tuple-element(%state), index=1
  %copied = s32[] copy(%i)
  %stepped = s32[] fusion(%copied), kind=kLoop, calls=%next
  ROOT %state.1 = (s32[], f32[8]) tuple(STEPPED, %x)
}

%condition (state.2: (s32[], f32[8])) -> pred[] {
  %state.2 = (s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.2), index=0
  ROOT %goes = pred[] fusion(%i.1), kind=kLoop, calls=%less
}

ENTRY %main (input: f32[8], given: s32[]) -> f32[8] {
  %input = f32[8] parameter(0)
  %given = s32[] parameter(1)
  %one = s32[] constant(1)
  %start = s32[] copy(START)
  %first = (s32[], f32[8]) tuple(%start, %input)
  %loop = (s32[], f32[8]) while(%first), condition=%condition, body=%body, backend_config={"known_induction_variable":{"tuple_index":"0"}}
  ROOT %end = f32[8] get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("limit", "start", "stepped", "expected"),
    [
        (31, "%one", "%stepped", 15),
        (32, "%one", "%stepped", 16),
        (1, "%one", "%stepped", 0),
        # The start is an argument, or the counter stands still.
        (31, "%given", "%stepped", None),
        (31, "%one", "%i", None),
    ],
)
def test_the_count_follows_from_start_step_and_limit(limit, start, stepped, expected):
    module = Module.parse(TEXT.replace("LIMIT", str(limit)).replace("START", start).replace("STEPPED", stepped))
    loop = module.named["loop"]
    assert trip_count(module, loop) == expected
    assert list(unknown_loops(module)) == ([loop] if expected is None else [])


@pytest.mark.parametrize(
    ("name", "expected", "with_a_further_round"),
    [
        ("jit(step)/jvp(jgt.trips.72)/jgt.useful.8of9/while", 72, 72),
        ("jit(step)/transpose(jvp(jgt.more_rounds))/while", 0, 1),
        ("jit(step)/jgt.more_rounds.7/while", 0, 1),
        # The innermost loop is meant, and the scope of a loop around it is not its own.
        ("jit(step)/jgt.more_rounds/while/body/closed_call/jgt.trips.5/while", 5, 5),
        ("jit(step)/jgt.trips.5/while/body/closed_call/while", 15, 15),
    ],
)
def test_the_name_of_a_loop_says_which_count_to_expect(name, expected, with_a_further_round):
    text = TEXT.replace("LIMIT", "31").replace("START", "%one").replace("STEPPED", "%stepped")
    text = text.replace('backend_config={"known_ind', f'metadata={{op_name="{name}"}}, backend_config={{"known_ind')
    module = Module.parse(text)
    loop = module.computations["main"].instructions["loop"]
    assert [trip_count(module, loop, further) for further in (0, 1)] == [expected, with_a_further_round]
    assert not list(unknown_loops(module))


def test_how_many_further_rounds_there_can_be():
    assert possible_rounds("jit(step)/jvp(jgt.more_rounds.3)/while") == 3
    assert possible_rounds("jit(step)/jgt.more_rounds/while") == 0
    assert possible_rounds("jit(step)/jgt.more_rounds.3/while/body/while") is None
    assert possible_rounds("jit(step)/jgt.trips.3/while") is None
