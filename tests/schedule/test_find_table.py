"""A schedule by name or file, and everything that can be wrong with the request."""

import pytest

from jgt.document import InputError
from jgt.schedule.custom import read_table, write_table
from jgt.schedule.schedules import SCHEDULES, find_table, schedule_table


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A table of two stages and three microbatches, interleaved, as own.csv."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text(write_table(schedule_table("interleaved", 2, 3, 2)))
    return read_table("own.csv")


def problems(*asked):
    with pytest.raises(InputError) as caught:
        find_table(*asked, "run.yaml:3")
    assert all(problem.startswith("run.yaml:3: ") for problem in caught.value.problems)
    return [problem.removeprefix("run.yaml:3: ") for problem in caught.value.problems]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_by_name(name):
    assert find_table(name, 3, 5, None, "here") == schedule_table(name, 3, 5)
    assert find_table(name, 3, 5, SCHEDULES[name].virtual or 4, "here") == schedule_table(name, 3, 5, 4)


def test_a_table_by_path(own, tmp_path):
    assert find_table("own.csv", None, None, None, "here") == own
    assert find_table("own.csv", 2, 3, 2, "here") == own
    assert find_table(str(tmp_path / "own.csv"), 2, None, None, "here") == own


def test_names_that_are_unknown():
    assert problems("1f2b", 2, 2, None) == [
        "there is no schedule '1f2b'. Did you mean '1f1b'? A table of your own is a path that ends with .csv"
    ]
    known = ", ".join(SCHEDULES)
    assert problems("own.txt", 2, 2, None) == [
        f"there is no schedule 'own.txt'. Known: {known}. A table of your own is a path that ends with .csv"
    ]


def test_a_file_that_is_missing(own):
    assert problems("mine.csv", 2, 2, None) == [f"there is no file 'mine.csv'. Name a .csv file or one of {', '.join(SCHEDULES)}"]


def test_other_numbers_than_the_tables(own):
    assert problems("own.csv", 4, 8, 1) == [
        "stages is 4, but the table own.csv has 2. Change one of them",
        "microbatches is 8, but the table own.csv has 3. Change one of them",
        "virtual is 1, but the table own.csv has 2. Change one of them",
    ]


def test_chunks_that_a_schedule_does_not_take():
    free = "Leave virtual out, or take interleaved or zb_interleaved"
    assert problems("1f1b", 2, 2, 2) == [f"virtual is 2, but 1f1b always has 1 chunk a stage. {free}"]
    assert problems("zigzag", 2, 2, 3) == [f"virtual is 3, but zigzag always has 2 chunks a stage. {free}"]


def test_numbers_below_one(own):
    below = ["stages must be at least 1, not 0", "microbatches must be at least 1, not -3", "virtual must be at least 1, not 0"]
    assert problems("1f1b", 0, -3, 0) == below
    assert problems("own.csv", 0, -3, 0) == below


def test_numbers_that_are_missing():
    assert problems("1f2b", None, None, 0) == [
        "virtual must be at least 1, not 0",
        "there is no schedule '1f2b'. Did you mean '1f1b'? A table of your own is a path that ends with .csv",
        "stages is missing. Only a .csv file has its own",
        "microbatches is missing. Only a .csv file has its own",
    ]


def test_what_is_wrong_in_the_table_comes_with_its_own_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text("F0\nB\n")
    with pytest.raises(InputError, match=r"^own\.csv:2: stage 0: 'B' is not an item"):
        find_table("own.csv", None, None, None, "here")
    with pytest.raises(InputError) as caught:
        find_table("own.csv", 0, None, None, "here")
    first, second = caught.value.problems
    assert first == "here: stages must be at least 1, not 0"
    assert second.startswith("own.csv:2: ")
