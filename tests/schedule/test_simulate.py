"""Time in lockstep: a tick lasts as long as its slowest stage, and a slot that one stage needs costs all of them."""

import dataclasses

import pytest

from jgt.schedule.schedules import SCHEDULES, schedule_table
from jgt.schedule.simulate import Costs, TickSlot, simulate
from jgt.schedule.table import Item, Table


def table(**rows):
    """Two stages, one microbatch."""
    return Table(name="own", num_stages=2, num_microbatches=1, stages=(0, 1), **rows)


SMALL = table(
    forward=((Item(0, 0), None), (None, Item(0, 1)), (None, None), (None, None)),
    backward=((None, None), (None, Item(0, 1)), (None, None), (Item(0, 0), None)),
)


def test_slots_one_after_another():
    found = simulate(SMALL, Costs(forward=1, backward=2, weight=3))
    assert found.slots == (
        TickSlot(tick=0, kind="F", start=0, length=1),
        TickSlot(tick=1, kind="F", start=1, length=1),
        TickSlot(tick=1, kind="B", start=2, length=5),
        TickSlot(tick=3, kind="B", start=7, length=5),
    )
    assert (found.table.num_ticks, found.time, found.bubble) == (4, 12, 0.5)


def test_weight_gradients_have_slots_of_their_own():
    split = dataclasses.replace(SMALL, weight=((None, None), (None, None), (None, Item(0, 1)), (Item(0, 0), None)))
    found = simulate(split, Costs(forward=1, backward=2, weight=3))
    assert [(slot.tick, slot.kind, slot.length) for slot in found.slots] == [
        (0, "F", 1), (1, "F", 1), (1, "B", 2), (2, "W", 3), (3, "B", 2), (3, "W", 3),
    ]  # fmt: skip
    assert found.time == 12


def test_the_slowest_stage_is_what_a_slot_costs():
    found = simulate(SMALL, stage_costs=(1, 3))
    assert found.time == 3 * simulate(SMALL).time
    assert found.bubble == pytest.approx(1 - 1 * 3 * 2 / found.time)
    assert found.stage_costs == (1, 3)


def test_a_chunk_costs_its_share():
    assert simulate(schedule_table("interleaved", 4, 8, 4)).slots[0].length == 0.25
    assert simulate(schedule_table("interleaved", 1, 3, 3)).time == pytest.approx(9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_stage_has_no_bubble(name):
    assert simulate(schedule_table(name, 1, 5)).bubble == pytest.approx(0, abs=1e-12)
    assert simulate(schedule_table(name, 1, 5), Costs(forward=0.1, backward=0.2, weight=0.3)).bubble >= 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_slots_fill_the_time(name):
    found = simulate(schedule_table(name, 4, 6), Costs(forward=1, backward=1.5, weight=0.25), (1, 2, 1, 0.5))
    for before, after in zip(found.slots, found.slots[1:], strict=False):
        assert before.start + before.length == pytest.approx(after.start)
        assert (before.tick, before.kind) != (after.tick, after.kind)
    assert found.slots[-1].start + found.slots[-1].length == pytest.approx(found.time)


def test_an_activation_is_kept_from_forward_to_the_last_use_both_included():
    assert simulate(SMALL).peaks == (1, 1)
    two = dataclasses.replace(
        SMALL,
        num_microbatches=2,
        forward=((Item(0, 0), None), (None, Item(0, 1)), (None, None), (Item(1, 0), None), (None, Item(1, 1)), (None, None)),
        backward=((None, None), (None, Item(0, 1)), (None, None), (Item(0, 0), None), (None, Item(1, 1)), (Item(1, 0), None)),
    )
    assert simulate(two).peaks == (2, 1)
    weight = ((None, None),) * 4 + ((None, Item(0, 1)), (Item(0, 0), None))
    first = dataclasses.replace(two, weight=weight)
    assert simulate(first).peaks == (2, 2)
    assert simulate(first).peak == 2


def test_peaks_by_stage():
    assert simulate(schedule_table("1f1b", 4, 8)).peaks == (7, 5, 3, 1)
    assert simulate(schedule_table("zigzag", 4, 8)).peaks == (4, 4, 4, 4)
    assert simulate(schedule_table("interleaved", 4, 8, 2)).peaks == (5.5, 4.5, 3.5, 2.5)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": 0}, "forward must be a number above 0, not 0"),
        ({"backward": -1.5}, "backward must be a number above 0, not -1.5"),
        ({"weight": -1}, "weight must be a number of at least 0, not -1"),
        ({"forward": float("nan")}, "forward must be a number above 0, not nan"),
        ({"weight": float("inf")}, "weight must be a number of at least 0, not inf"),
    ],
)
def test_costs_are_checked(costs, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Costs(**costs)


def test_weight_gradients_may_be_free():
    assert simulate(SMALL, Costs(backward=2, weight=0)).time == simulate(SMALL).time


@pytest.mark.parametrize(
    ("stage_costs", "message"),
    [
        ((1,), "1 number for 2 stages: give one for each stage"),
        ((1, 0), "the cost of a stage must be a number above 0, not 0"),
        ((float("inf"), 1), "the cost of a stage must be a number above 0, not inf"),
    ],
)
def test_stage_costs_are_checked(stage_costs, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        simulate(SMALL, stage_costs=stage_costs)
