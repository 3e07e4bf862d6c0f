"""Every schedule runs with all sizes, and its ticks, time, bubble and peak equal the closed forms."""

import itertools
from pathlib import Path

import pytest

from jgt.schedule.schedules import SCHEDULES, schedule_table
from jgt.schedule.simulate import Costs, simulate
from jgt.schedule.table import Item
from jgt.schedule.verify import find_faults

NAMES = [(name, v) for name, row in SCHEDULES.items() for v in ((1, 2, 4) if row.virtual is None else (row.virtual,))]
SIZES = list(itertools.product((1, 2, 3, 4, 8), range(1, 33)))
EVEN = [(S, M) for S, M in SIZES if M >= S and M % S == 0]


@pytest.fixture(scope="module")
def tables():
    """All tables, by name, chunks per stage, S and M."""
    return {(name, v, S, M): schedule_table(name, S, M, v) for name, v in NAMES for S, M in SIZES}


@pytest.mark.parametrize(("name", "v"), NAMES)
def test_every_table_runs(tables, name, v):
    for S, M in SIZES:
        assert find_faults(tables[name, v, S, M]) == [], (S, M)


def test_there_is_no_more_in_a_table_than_it_needs(tables):
    for (name, v, S, M), table in tables.items():
        numbers = (table.name, table.num_stages, table.num_microbatches, table.virtual, table.num_chunks)
        assert numbers == (name, S, M, v, S * v)
        assert (table.weight is not None) == name.startswith("zb")
        kinds = ("F", "B", "W") if name.startswith("zb") else ("F", "B")
        assert sum(1 for kind in ("F", "B", "W") for _ in table.items(kind)) == len(kinds) * M * S * v
        assert all(any(any(table.rows(kind)[tick]) for kind in kinds) for tick in (0, table.num_ticks - 1))


def test_where_chunks_are():
    assert schedule_table("interleaved", 2, 4, 3).stages == (0, 1, 0, 1, 0, 1)
    zigzag = schedule_table("zigzag", 3, 4)
    assert zigzag.stages == (0, 1, 2, 2, 1, 0)
    assert [zigzag.local_chunk(chunk) for chunk in range(6)] == [0, 0, 0, 1, 1, 1]


def test_a_table_as_it_is_drawn_in_papers():
    table = schedule_table("1f1b", 2, 3)
    m0, m1, m2 = (Item(m, 0) for m in range(3))
    n0, n1, n2 = (Item(m, 1) for m in range(3))
    assert table.forward == ((m0, None), (m1, n0), (m2, n1), (None, n2), (None, None))
    assert table.backward == ((None, None), (None, n0), (m0, n1), (m1, n2), (m2, None))


# (ticks, slots of F in whole stages, of B, of W) of each schedule where S divides M.
FORMS = {
    "gpipe": lambda S, M, v: (2 * (M + S - 1), M + S - 1, M + S - 1, None),
    "1f1b": lambda S, M, v: (M + 2 * S - 2, M + S - 1, M + S - 1, None),
    "interleaved": lambda S, M, v: (M * v + S * v + S - 2, M + (S - 1) / v, M + (S - 1) / v, None),
    "zigzag": lambda S, M, v: (2 * M + 4 * S - 3, M + S - 1, M + S - 1, None),
    "zb": lambda S, M, v: (M + 2 * S - 2, M + S - 1, M + S - 1, M),
    "zb_interleaved": lambda S, M, v: (M * v + S * v + S - 2, M + (S - 1) / v, M + (S - 1) / v, M),
}


@pytest.mark.parametrize(("name", "v"), NAMES)
def test_ticks_and_time(tables, name, v):
    tf, tb, tw = 2.0, 3.0, 5.0
    for S, M in EVEN:
        found = simulate(tables[name, v, S, M], Costs(forward=tf, backward=tb, weight=tw))
        ticks, forward, backward, weight = FORMS[name](S, M, v)
        time = forward * tf + backward * tb + (backward if weight is None else weight) * tw
        assert found.table.num_ticks == ticks, (S, M)
        assert found.time == pytest.approx(time), (S, M)
        assert found.bubble == pytest.approx(1 - M * (tf + tb + tw) / time, abs=1e-12), (S, M)


@pytest.mark.parametrize(("name", "v"), NAMES)
def test_peaks(tables, name, v):
    for S, M in SIZES:
        peak = simulate(tables[name, v, S, M]).peak
        form = {"gpipe": M, "zigzag": min(M, S)}.get(name, min(M * v, (v + 1) * S - 1) / v)
        if v == 1 or name == "zigzag" or M % S == 0 or M < S:
            assert peak == form, (S, M)
        else:
            # The last group of microbatches is not full: a stage may never hold as much.
            assert S <= peak <= form, (S, M)


@pytest.mark.parametrize(
    ("name", "v", "bubbles", "peak"),
    [
        ("gpipe", 1, (0.273, 0.086), 32),
        ("1f1b", 1, (0.273, 0.086), 7),
        ("interleaved", 2, (0.158, 0.045), 5.5),
        ("interleaved", 4, (0.086, 0.023), 4.75),
        ("zigzag", 2, (0.273, 0.086), 4),
        ("zb", 1, (0.200, 0.059), 7),
        ("zb_interleaved", 2, (0.111, 0.030), 5.5),
    ],
)
def test_known_numbers_of_four_stages(tables, name, v, bubbles, peak):
    few, many = (simulate(tables[name, v, 4, M]) for M in (8, 32))
    assert (round(few.bubble, 3), round(many.bubble, 3)) == bubbles
    assert many.peak == peak
    if name == "zigzag":
        assert set(many.peaks) == {4}


def test_interleaving_four_stages_and_32_microbatches_wastes_less_than_a_twentieth(tables):
    assert simulate(tables["interleaved", 2, 4, 32]).bubble <= 0.0455


@pytest.mark.parametrize(("name", "v"), NAMES)
def test_an_evaluation_runs_the_forward_items_in_their_order(tables, name, v):
    for S, M in [(1, 1), (3, 5), (4, 8)]:
        table = tables[name, v, S, M]
        only = table.forward_only()
        assert [item for _, _, item in only.items("F")] == [item for _, _, item in table.items("F")]
        assert not list(only.items("B")) and only.weight is None
        assert all(any(row) for row in only.forward)
        ticks = {(item.microbatch, item.chunk): tick for tick, _, item in only.items("F")}
        assert all(tick > ticks[m, g - 1] for (m, g), tick in ticks.items() if g)


def test_chunks_of_a_stage_by_name():
    assert [row.chunks_per_stage(None) for row in SCHEDULES.values()] == [1, 1, 2, 2, 1, 2]
    assert SCHEDULES["interleaved"].chunks_per_stage(4) == 4
    assert SCHEDULES["1f1b"].chunks_per_stage(4) == 1
    with pytest.raises(KeyError):
        schedule_table("dualpipe", 2, 2)


def test_code_names_a_schedule_in_one_file():
    sources = [path for folder in ("jgt", "train") for path in (Path(__file__).parents[2] / folder).rglob("*.py")]
    # The order of a long sequence is called zigzag, too.
    for name in SCHEDULES.keys() - {"zigzag"}:
        # The pipeline section has a default.
        more = {"config.py"} if name == "1f1b" else set()
        assert {path.name for path in sources if f'"{name}"' in path.read_text()} == {"schedules.py"} | more
