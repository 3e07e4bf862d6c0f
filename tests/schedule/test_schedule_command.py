"""`jgt schedule`, run in this process: exit codes, output and files."""

import json
import subprocess
import sys

import pytest

from jgt.__main__ import main as jgt_main
from jgt.schedule.__main__ import main
from jgt.schedule.custom import read_table
from jgt.schedule.schedules import SCHEDULES, schedule_table
from jgt.schedule.simulate import COMPARISON_COLUMNS
from jgt.schedule.table import KINDS

SMALL = ["--stages", "4", "--microbatches", "8"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shown(capsys):
    """The output of a command that succeeds."""

    def _shown(*arguments):
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return _shown


@pytest.fixture
def wrong(capsys):
    """The problems that the command reports."""

    def _wrong(*arguments):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        lines = err.splitlines()
        assert all(line.startswith("jgt schedule: ") for line in lines)
        return [line.removeprefix("jgt schedule: ") for line in lines]

    return _wrong


@pytest.mark.parametrize("name", SCHEDULES)
def test_words_and_a_picture_with_every_item(shown, name):
    text = shown(name, *SMALL)
    table = schedule_table(name, 4, 8)
    assert text.splitlines()[2] == SCHEDULES[name].good_for
    picture = text.split("\n\n", 1)[1].split()
    for kind in KINDS:
        for _, _, item in table.items(kind):
            assert table.item_text(kind, item) in picture
    assert "\x1b" not in text


def test_the_numbers_in_words(shown):
    assert shown("1f1b", *SMALL).splitlines()[:2] == [
        "1f1b: 4 stages, 8 microbatches, 1 chunk a stage",
        "14 ticks, time 33, bubble 27.3%, peak 7 activations of one microbatch on a whole stage (by stage: 7, 5, 3, 1)",
    ]
    assert shown("interleaved", "--stages", "1", "--microbatches", "1", "--virtual", "3").splitlines()[:2] == [
        "interleaved: 1 stage, 1 microbatch, 3 chunks a stage",
        "5 ticks, time 3, bubble 0.0%, peak 1 activation of one microbatch on a whole stage",
    ]


def test_json_has_these_keys(shown):
    assert json.loads(shown("interleaved", *SMALL, "--json")) == {
        "name": "interleaved", "stages": 4, "microbatches": 8, "virtual": 2, "ticks": 26, "bubble": 0.157895, "peak_activations": 5.5,
    }  # fmt: skip
    found = json.loads(shown("1f1b", *SMALL, "--json"))
    assert found["peak_activations"] == 7 and isinstance(found["peak_activations"], int)
    assert list(found) == ["name", "stages", "microbatches", "virtual", "ticks", "bubble", "peak_activations"]


def test_costs(shown):
    def bubble(*options):
        return json.loads(shown("zb", *SMALL, "--json", *options))["bubble"]

    assert bubble() == 0.2
    assert bubble("--costs", "1,1,0") == pytest.approx(1 - 16 / 22, abs=1e-6)
    assert bubble("--costs", "1, 2, 3.5") == pytest.approx(1 - 8 * 6.5 / (11 * 3 + 8 * 3.5), abs=1e-6)
    assert bubble("--stage-costs", "1,1,1.2,1") == pytest.approx(1 - 24 * 1.05 / 36, abs=1e-6)


def test_comparison(shown):
    text = shown("--compare", "--stages", "4", "--microbatches", "32")
    header, *lines = [line.split() for line in text.splitlines()[: 1 + len(SCHEDULES)]]
    assert header == list(COMPARISON_COLUMNS)
    assert lines == [
        ["gpipe", "1", "70", "105", "8.6%", "32", "1x"],
        ["1f1b", "1", "38", "105", "8.6%", "7", "1x"],
        ["interleaved", "2", "74", "100.5", "4.5%", "5.5", "2x"],
        ["zigzag", "2", "77", "105", "8.6%", "4", "2x"],
        ["zb", "1", "38", "102", "5.9%", "7", "1x"],
        ["zb_interleaved", "*", "2", "74", "99", "3.0%", "5.5", "2x"],
    ]
    assert "* the smallest bubble." in text


def test_comparison_for_programs(shown):
    objects = json.loads(shown("--compare", *SMALL, "--virtual", "4", "--json"))
    assert [one["name"] for one in objects] == list(SCHEDULES)
    assert [one["virtual"] for one in objects] == [1, 1, 4, 2, 1, 4]
    assert all(one == json.loads(shown(one["name"], *SMALL, "--virtual", str(one["virtual"]), "--json")) for one in objects)


def test_all_that_are_equally_good_have_a_star(shown):
    assert shown("--compare", "--stages", "1", "--microbatches", "3").count(" * ") == len(SCHEDULES)


def test_a_table_on_a_full_disk(capsys, folder):
    (folder / "full.csv").symlink_to("/dev/full")
    assert main(["1f1b", *SMALL, "--csv", "full.csv"]) == 2
    assert capsys.readouterr().err == "jgt schedule: full.csv cannot be written: No space left on device\n"


def test_a_table_of_ones_own(shown, folder):
    written = json.loads(shown("zb_interleaved", *SMALL, "--csv", "own.csv", "--json"))
    assert read_table("own.csv").num_microbatches == 8
    assert json.loads(shown("own.csv", "--json")) == {**written, "name": "own.csv"}
    assert shown("own.csv").splitlines()[2] == "A table of your own: it is complete and does not deadlock."
    names = [one["name"] for one in json.loads(shown("own.csv", "--compare", "--json"))]
    assert names == ["own.csv", *SCHEDULES]


def test_a_broken_table_of_ones_own(folder, capsys):
    (folder / "own.csv").write_text("F0\n-\n")
    assert main(["own.csv"]) == 2
    assert capsys.readouterr().err == "own.csv: microbatch 0 never runs backward on chunk 0 (stage 0). Add B in tick 0 or later\n"
    assert main(["own.csv", "--compare"]) == 2
    assert capsys.readouterr().err.startswith("own.csv: microbatch 0 never")


def test_every_problem_at_once(wrong):
    arguments = [
        "1f2b",
        "--stages",
        "0",
        "--virtual",
        "0",
        "--costs",
        "1,2",
        "--stage-costs",
        "a",
        "--csv",
        "none/a.csv",
    ]
    assert wrong(*arguments) == [
        "--costs: 2 numbers, but there are 3 kinds of items. Write F,B,W, such as 1,1,1",
        "--stage-costs: 'a' is not a list of numbers. Separate them with commas, such as 1,1,1.2",
        "--csv: 'none/a.csv' cannot be written: there is no folder 'none'",
        "stages must be at least 1, not 0",
        "virtual must be at least 1, not 0",
        "there is no schedule '1f2b'. Did you mean '1f1b'? A table of your own is a path that ends with .csv",
        "microbatches is missing. Only a .csv file has its own",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["1f1b", *SMALL, "--virtual", "2"],
            "virtual is 2, but 1f1b always has 1 chunk a stage. Leave virtual out, or take interleaved or zb_interleaved",
        ),
        (["1f1b", *SMALL, "--costs", "0,1,1"], "--costs: forward must be a number above 0, not 0"),
        (["1f1b", *SMALL, "--stage-costs", "1,2"], "--stage-costs: 2 numbers for 4 stages: give one for each stage"),
        (["--compare", *SMALL, "--stage-costs", "1,0,1,1"], "--stage-costs: the cost of a stage must be a number above 0, not 0"),
        (["1f1b", *SMALL, "--csv", "a.txt"], "--csv: 'a.txt' does not end with .csv. Name a .csv file"),
        (["--compare", *SMALL, "--csv", "a.csv"], "--csv: writes one schedule, but --compare shows all. Leave one of the two out"),
        (["none.csv"], f"there is no file 'none.csv'. Name a .csv file or one of {', '.join(SCHEDULES)}"),
        (SMALL, f"a schedule is missing. Name {', '.join(SCHEDULES)} or a .csv file, or compare them with --compare"),
        (["--compare", *SMALL, "--virtual", "0"], "virtual must be at least 1, not 0"),
    ],
)
def test_a_problem(wrong, arguments, message):
    assert wrong(*arguments) == [message]


def test_comparison_needs_numbers(wrong):
    assert wrong("--compare") == [f"{key} is missing. Only a .csv file has its own" for key in ("stages", "microbatches")]


def test_paths_that_turn_out_not_to_be_writable(wrong, folder, monkeypatch):
    (folder / "a.csv").mkdir()
    assert wrong("1f1b", *SMALL, "--csv", "a.csv") == ["--csv: 'a.csv' is a folder. Name a file"]

    def full(*_, **__):
        raise OSError(28, "No space left on device", "b.csv")

    monkeypatch.setattr("jgt.schedule.__main__.Path.write_text", full)
    assert wrong("1f1b", *SMALL, "--csv", "b.csv") == ["b.csv cannot be written: No space left on device"]


def test_numbers_that_are_none(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["1f1b", "--stages", "two", "--microbatches", "8"])
    assert caught.value.code == 2
    assert "command line: --stages: must be a whole number, not 'two'" in capsys.readouterr().err


def test_it_is_a_command_of_jgt(capsys):
    assert jgt_main(["schedule", "1f1b", *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ticks"] == 14


def test_neither_jax_nor_numpy_nor_matplotlib_is_imported():
    code = """
import sys
from jgt.__main__ import main
assert main(["schedule", "zb", "--stages", "2", "--microbatches", "3"]) == 0
assert main(["schedule", "--compare", "--stages", "2", "--microbatches", "3"]) == 0
assert main(["schedule", "none", "--stages", "2", "--microbatches", "3", "--csv", "a.csv"]) == 2
assert not {"jax", "numpy", "matplotlib"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
