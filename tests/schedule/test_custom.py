"""Tables as CSV: a written table can be read again, and mistakes are reported with their line."""

import dataclasses

import pytest

from jgt.document import InputError
from jgt.schedule.custom import read_table, write_table
from jgt.schedule.schedules import SCHEDULES, schedule_table
from jgt.schedule.table import Item
from jgt.schedule.verify import LIMIT

ITEM = "Write F, B or W, a microbatch, and .chunk if a stage has several, such as F3 or B3.5; - if the stage is idle"


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads a text as the file own.csv."""
    monkeypatch.chdir(tmp_path)

    def _read(text):
        (tmp_path / "own.csv").write_text(text)
        return read_table("own.csv")

    return _read


@pytest.fixture
def problems(read):
    """The problems of reading a text."""

    def _problems(text):
        with pytest.raises(InputError) as caught:
            read(text)
        return list(caught.value.problems)

    return _problems


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("S", "M"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 8)])
def test_what_is_written_is_read(read, name, S, M):
    for virtual in (1, 2, 3) if SCHEDULES[name].virtual is None else (None,):
        table = schedule_table(name, S, M, virtual)
        assert read(write_table(table)) == dataclasses.replace(table, name="own.csv")


def test_what_is_written():
    assert write_table(schedule_table("zb", 2, 1)) == (
        "# zb: 2 stages; 1 microbatch; 1 chunk a stage\n# stage 0,stage 1\nF0,-\n-,F0 B0\nB0 W0,W0\n"
    )
    assert write_table(schedule_table("zigzag", 1, 1)).splitlines()[2:] == ["F0.0", "F0.1 B0.1", "B0.0"]


def test_chunks_are_written_where_the_stage_does_not_tell_them(read):
    assert schedule_table("1f1b", 2, 1).item_text("B", Item(3, 1)) == "B3"
    backwards = read("-,F0.0\nF0.1 B0.1,-\n-,B0.0\n")
    assert backwards.stages == (1, 0)
    assert backwards.item_text("B", Item(3, 1)) == "B3.1"
    assert read(write_table(backwards)) == backwards


def test_freedoms_of_a_person_or_a_spreadsheet(read, tmp_path):
    tidy = read("F0,-\n-,F0 B0\nB0,-\n")
    assert read("\ufeff# note,,,,\r\n\r\n F0 ,\r\n,  B0   F0.1\r\n  # more\r\nB0.0,-") == tidy
    assert tidy.name == "own.csv"
    assert (tidy.num_stages, tidy.num_microbatches, tidy.virtual, tidy.num_ticks, tidy.weight) == (2, 1, 1, 3, None)
    assert read_table(tmp_path / "own.csv") == tidy


def test_idle_ticks_stay(read):
    table = read("F0\n-\nB0\n")
    assert (table.num_ticks, table.forward[1]) == (3, (None,))


def test_cells_that_are_no_items(problems):
    assert problems("# a comment\nF0,f0\n\nF1.,3\nB0 F-1,FB0 F0.1.2\n") == [
        f"own.csv:2: stage 1: 'f0' is not an item. {ITEM}",
        f"own.csv:4: stage 0: 'F1.' is not an item. {ITEM}",
        f"own.csv:4: stage 1: '3' is not an item. {ITEM}",
        f"own.csv:5: stage 0: 'F-1' is not an item. {ITEM}",
        f"own.csv:5: stage 1: 'FB0' is not an item. {ITEM}",
        f"own.csv:5: stage 1: 'F0.1.2' is not an item. {ITEM}",
    ]


def test_two_of_a_kind_in_a_cell(problems):
    assert problems("F0 F1 B0\nB1\n") == ["own.csv:1: stage 0: two F in 'F0 F1 B0'. A stage runs one F a tick: move one of them"]


def test_ragged_rows(problems):
    wrong = "but line 2 has 2. Give every row a cell for each stage, - for an idle one"
    assert problems("#\nF0,-\n-\nB0,F0 B0,-\n") == [f"own.csv:3: 1 cells, {wrong}", f"own.csv:4: 3 cells, {wrong}"]


def test_a_chunk_in_two_columns(problems):
    wrong = "A chunk's layers are on one stage: keep it in one column"
    assert problems("F0.0,-\nF1.0,F0.1 B0.1\nB0.0,F1.0\n-,F1.1 B1.1\n-,B1.0\n") == [
        f"own.csv:3: stage 1: chunk 0 is in the column of stage 0 too (line 1). {wrong}"
    ]


def test_numbers_that_are_left_out(problems):
    assert problems("F0,-\nF2,F0 B0\nB0,F2 B2\nB2,-") == [
        "own.csv:2: stage 0: microbatch 2 is here, but microbatch 1 is nowhere. Number them from 0 without a gap"
    ]
    assert problems("F0.1\nF0.999999999 B0.999999999\nB0.1") == [
        "own.csv:2: stage 0: chunk 999999999 is here, but chunk 0 is nowhere. Number them from 0 without a gap"
    ]


def test_deadlocks_with_their_lines(problems):
    assert problems("# two stages\nF0,-\n\nB0,F0 B0\n") == [
        "own.csv:4: tick 1, stage 0: B of microbatch 0, chunk 0 waits for B of chunk 1, "
        "which runs in the same tick and arrives in the next: "
        "a deadlock. Move it to tick 2 or later"
    ]


def test_what_stands_nowhere_comes_last(problems):
    assert problems("F0,-\nB0,F0\n") == [
        "own.csv: microbatch 0 never runs backward on chunk 1 (stage 1). Add B in tick 1 or later",
    ]
    assert problems("F0,-\nF1 B0,F0 B0\n-,F1\n")[1:] == [
        "own.csv: microbatch 1 never runs backward on chunk 0 (stage 0). Add B in tick 1 or later",
        "own.csv: microbatch 1 never runs backward on chunk 1 (stage 1). Add B in tick 2 or later",
    ]


def test_where_one_w_stands_every_backward_needs_its_own(problems):
    assert problems("F0\nB0 W0 F1\nB1\n") == [
        "own.csv: microbatch 1 never gets the weight gradients of chunk 0 (stage 0). Add W in tick 2 or later"
    ]


def test_stages_without_a_chunk(problems):
    assert problems("F0 B0,-\n") == ["own.csv: stage 1 holds 0 of the chunks and stage 0 holds 1. Give every stage the same number"]


@pytest.mark.parametrize("text", ["", "# only this\n\n"])
def test_nothing_in_the_file(problems, text):
    assert problems(text) == [
        "own.csv: there is no tick. Write a row for each tick and a column for each stage, with items such as F0 or B2"
    ]


def test_nobody_has_an_item(problems):
    assert problems("-,-\n,\n") == ["own.csv: there is no item. Write F0 for microbatch 0 forward, B0 for backward"]


def test_many_problems_are_counted(problems):
    found = problems("\n".join(["x"] * 50))
    assert len(found) == LIMIT + 1
    assert found[LIMIT - 1].startswith(f"own.csv:{LIMIT}: ")
    assert found[-1] == "and 30 more problems"


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.csv").write_bytes(b"F0\n\xff")
    (tmp_path / "folder.csv").mkdir()
    for name, message in [
        ("latin.csv", "latin.csv:2: not UTF-8: byte 0xff at offset 3. Save the file as UTF-8"),
        ("folder.csv", "folder.csv: cannot be read: it is a folder, not a file"),
        ("none.csv", "none.csv: cannot be read: No such file or directory"),
    ]:
        with pytest.raises(InputError) as caught:
            read_table(name)
        assert caught.value.problems == (message,)
