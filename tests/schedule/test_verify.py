"""Broken tables are reported, and the verdict agrees with a slow run of the table."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgt.schedule.schedules import SCHEDULES, schedule_table
from jgt.schedule.table import Item, Table
from jgt.schedule.verify import LIMIT, find_faults, limit_texts

FIELDS = {"F": "forward", "B": "backward", "W": "weight"}


def problems(table):
    """The faults of a table, as a message lists them."""
    return limit_texts([fault.text for fault in find_faults(table)])


def put(table, kind, tick, stage, item):
    """The table with one entry replaced."""
    rows = [list(row) for row in table.rows(kind)]
    rows[tick][stage] = item
    return dataclasses.replace(table, **{FIELDS[kind]: tuple(map(tuple, rows))})


def longer(table, ticks):
    """The table with empty ticks at its end."""
    empty = ((None,) * table.num_stages,) * ticks
    return dataclasses.replace(table, **{name: rows + empty for name in FIELDS.values() if (rows := getattr(table, name)) is not None})


def place(table, kind, microbatch, chunk):
    """Tick and stage of an item."""
    return next((tick, stage) for tick, stage, item in table.items(kind) if item == Item(microbatch, chunk))


def move(table, kind, microbatch, chunk, tick):
    """The table with an item moved to another tick, where it replaces the item that is there."""
    before, stage = place(table, kind, microbatch, chunk)
    return put(put(table, kind, before, stage, None), kind, tick, stage, Item(microbatch, chunk))


@pytest.fixture
def table():
    """1f1b: F of microbatch m on stage s in tick m + s, B in tick m + 4 - s."""
    return schedule_table("1f1b", 3, 4)


@pytest.mark.parametrize(
    ("kind", "never"),
    [
        ("F", "microbatch 2 never runs forward on chunk 1 (stage 1). Add F in tick 3 or later"),
        ("B", "microbatch 2 never runs backward on chunk 1 (stage 1). Add B in tick 5 or later"),
        ("W", "microbatch 2 never gets the weight gradients of chunk 1 (stage 1). Add W in tick 5 or later"),
    ],
)
def test_an_item_that_is_missing(kind, never):
    table = schedule_table("zb", 3, 4)
    assert problems(put(table, kind, *place(table, kind, 2, 1), None)) == [never]


def test_an_item_that_overwrote_another():
    table = schedule_table("1f1b", 1, 2)
    # F0 . / . F1 → F0 goes, as F1 takes its slot.
    assert problems(move(table, "F", 1, 0, 0)) == ["microbatch 0 never runs forward on chunk 0 (stage 0). Add F in tick 0 or later"]


def test_an_item_that_stands_twice(table):
    assert problems(put(table, "F", 5, 1, Item(2, 1))) == [
        "tick 5, stage 1: F of microbatch 2, chunk 1 is a duplicate: the first is in tick 3. Remove one of the two"
    ]


def test_forward_before_the_chunk_before(table):
    table = put(put(table, "F", 3, 1, None), "F", 0, 1, Item(2, 1))
    assert problems(table) == [
        "tick 0, stage 1: F of microbatch 2, chunk 1 waits for F of chunk 0, which runs in tick 2: a deadlock. Move it to tick 3 or later"
    ]


def test_backward_before_the_chunk_after(table):
    assert problems(move(longer(table, 3), "B", 3, 2, 8))[0] == (
        "tick 6, stage 1: B of microbatch 3, chunk 1 waits for B of chunk 2, which runs in tick 8: a deadlock. Move it to tick 9 or later"
    )


def test_an_exchange_takes_until_the_next_tick(table):
    table = move(longer(table, 1), "B", 3, 2, 6)
    assert problems(table) == [
        "tick 6, stage 1: B of microbatch 3, chunk 1 waits for B of chunk 2, which runs in the same tick and arrives in the next: "
        "a deadlock. Move it to tick 7 or later"
    ]


def test_backward_before_its_forward():
    table = Table(
        name="backward",
        num_stages=1,
        num_microbatches=1,
        stages=(0,),
        forward=((None,), (Item(0, 0),)),
        backward=((Item(0, 0),), (None,)),
    )
    assert problems(table) == [
        "tick 0, stage 0: B of microbatch 0, chunk 0 waits for F of chunk 0, which runs in tick 1: a deadlock. Move it to tick 1 or later"
    ]


def test_weight_gradients_before_the_backward():
    table = schedule_table("zb", 2, 2)
    tick, _ = place(table, "B", 0, 0)
    assert problems(move(table, "W", 0, 0, tick)) == []
    assert problems(move(table, "W", 0, 0, tick - 1)) == [
        f"tick {tick - 1}, stage 0: W of microbatch 0, chunk 0 waits for B of chunk 0, which runs in tick {tick}: "
        f"a deadlock. Move it to tick {tick} or later"
    ]


def test_the_last_that_an_item_waits_for_is_named():
    table = schedule_table("1f1b", 2, 1)  # F0 at 0, 1; B of chunk 1 at 1, of chunk 0 at 2
    late = move(move(longer(table, 4), "F", 0, 0, 3), "F", 0, 1, 5)
    assert problems(late) == [
        "tick 1, stage 1: B of microbatch 0, chunk 1 waits for F of chunk 1, which runs in tick 5: a deadlock. Move it to tick 5 or later",
        "tick 2, stage 0: B of microbatch 0, chunk 0 waits for F of chunk 0, which runs in tick 3: a deadlock. Move it to tick 3 or later",
    ]


def test_a_stage_with_fewer_chunks():
    zigzag = schedule_table("zigzag", 2, 2)
    found = problems(dataclasses.replace(zigzag, stages=(0, 1, 1, 1)))
    assert "stage 0 holds 1 of the chunks and stage 1 holds 3. Give every stage the same number" in found


def test_ticks_come_in_order_and_only_so_many(table):
    late = move(table, "F", 0, 0, 7)
    assert problems(move(late, "F", 1, 2, 0)) == sorted(problems(move(late, "F", 1, 2, 0)))
    nothing = dataclasses.replace(table, forward=((None,) * 3,) * table.num_ticks)
    assert len(problems(nothing)) == 12
    many = dataclasses.replace(nothing, num_microbatches=20)
    found = problems(many)
    assert len(found) == LIMIT + 1
    assert found[-1] == f"and {20 * 3 + 16 * 3 - LIMIT} more problems"


def runs(table):
    """Whether the table runs: follows what each stage receives, tick by tick. In the end, every item must have run once."""
    first, last = 0, table.num_chunks - 1
    arrived = {("F", m, first) for m in range(table.num_microbatches)}
    done = []
    for tick in range(table.num_ticks):
        sent = set()
        for stage in range(table.num_stages):
            for kind in ("F", "B", "W"):
                item = table.rows(kind)[tick][stage]
                if item is None:
                    continue
                m, g = item.microbatch, item.chunk
                if kind == "F":
                    ready = ("F", m, g) in arrived
                    sent.add(("F", m, g + 1))
                elif kind == "B":
                    ready = ("F", m, g) in done and (g == last or ("B", m, g) in arrived)
                    sent.add(("B", m, g - 1))
                else:
                    ready = ("B", m, g) in done
                if not ready:
                    return False
                done.append((kind, m, g))
        arrived |= sent
    kinds = ("F", "B") if table.weight is None else ("F", "B", "W")
    return sorted(done) == sorted((kind, m, g) for kind in kinds for m in range(table.num_microbatches) for g in range(table.num_chunks))


@st.composite
def changed(draw):
    """A schedule in which up to two items move to another tick."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    table = longer(schedule_table(name, draw(st.integers(1, 4)), draw(st.integers(1, 5))), 2)
    for _ in range(draw(st.integers(0, 2))):
        kind = draw(st.sampled_from(["F", "B", "W"][: 2 if table.weight is None else 3]))
        tick, stage, item = draw(st.sampled_from(list(table.items(kind))))
        near = st.integers(max(0, tick - 3), min(table.num_ticks - 1, tick + 3))
        there = draw(st.one_of(near, st.integers(0, table.num_ticks - 1)))
        table = put(put(table, kind, tick, stage, None), kind, there, stage, item)
    return table


@settings(max_examples=400, deadline=None)
@given(changed())
def test_the_verdict_is_that_of_a_run(table):
    assert (problems(table) == []) == runs(table)


def test_the_run_finds_both():
    table = schedule_table("zb", 3, 4)
    assert runs(table)
    assert runs(move(longer(table, 1), "W", 3, 0, table.num_ticks))
    assert not runs(move(table, "F", 2, 1, 0))
    assert not runs(put(table, "W", *place(table, "W", 0, 0), None))
