"""The timeline shows every item where it runs. It fits a terminal; a file gets all of it."""

import io
import re

import pytest
from rich.console import Console

from jgt.command.console import WIDTH_OF_FILES
from jgt.schedule.schedules import SCHEDULES, schedule_table
from jgt.schedule.table import KINDS
from jgt.schedule.timeline import MAX_BLOCKS, ink, print_comparison, print_timeline, shade


def drawn(table, **options):
    """The text that a console writes."""
    file = io.StringIO()
    print_timeline(table, Console(file=file, highlight=False, **options))
    return file.getvalue()


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def cells(text):
    """Tick → stage → texts, read from the columns below the tick numbers."""
    found = {}
    for block in text.split("\n\n")[:-1]:
        header, *lines = block.splitlines()
        ticks = [(match.start(), int(match[0])) for match in re.finditer(r"\d+", header)]
        for stage, line in enumerate(lines):
            assert line.startswith(f"stage {stage} ")
            ends = [start for start, _ in ticks[1:]] + [None]
            for (start, tick), end in zip(ticks, ends, strict=True):
                found.setdefault(tick, {})[stage] = line[start:end].split()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("S", "M", "width"), [(1, 1, 80), (4, 12, 160), (4, 12, 40), (12, 3, 60), (2, 120, 100)])
def test_every_item_stands_in_its_tick_and_stage(name, S, M, width):
    table = schedule_table(name, S, M)
    text = drawn(table, width=width)
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= width
    found = cells(text)
    assert list(found) == list(range(table.num_ticks))
    for tick, stages in found.items():
        used = [kind for kind in KINDS if any(table.rows(kind)[tick])]
        for stage, texts in stages.items():
            items = [(kind, table.rows(kind)[tick][stage]) for kind in used]
            assert texts == ["··" if item is None else table.item_text(kind, item) for kind, item in items]


def test_without_a_terminal_there_are_neither_colours_nor_loose_ends(capsys):
    print_timeline(schedule_table("interleaved", 4, 64, 4))
    text = capsys.readouterr().out
    assert "\x1b" not in text and "…" not in text and "not shown" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    *pictures, legend = text.split("\n\n")
    assert max(len(line) for picture in pictures for line in picture.splitlines()) <= WIDTH_OF_FILES
    assert legend.startswith("F0.0 forward   B0.15 backward with weight gradients   F3.5: microbatch 3 through chunk 5   ")


def test_a_terminal_gets_colours_and_shades():
    table = schedule_table("zb_interleaved", 2, 2, 2)
    text = drawn(table, width=200, force_terminal=True, color_system="truecolor")
    for kind in KINDS:
        for local in range(2):
            red, green, blue = shade(kind, local, 2)
            assert re.search(rf"48;2;{red};{green};{blue}m{kind}0", text), (kind, local)
    assert "F0.0" not in plain(text)
    assert "shade: chunk of the stage" in plain(text)


@pytest.mark.parametrize("options", [{"color_system": "standard"}, {"color_system": "truecolor", "no_color": True}, {"color_system": None}])
def test_chunks_are_written_where_shades_cannot_be_seen(options):
    text = drawn(schedule_table("interleaved", 2, 2, 2), width=200, force_terminal=True, **options)
    assert "F1.3" in plain(text)
    assert "38;" not in text and "48;" not in text


def test_the_middle_of_a_long_table_is_left_out_on_a_terminal():
    table = schedule_table("1f1b", 4, 300)
    text = plain(drawn(table, width=80, force_terminal=True, color_system="truecolor"))
    left_out = re.search(r"^ticks (\d+) to (\d+) are not shown; --csv FILE writes them all$", text, re.MULTILINE)
    assert len(re.findall("^tick ", text, re.MULTILINE)) == MAX_BLOCKS
    shown = cells(text.replace(left_out[0] + "\n\n", ""))
    assert set(shown) == set(range(table.num_ticks)) - set(range(int(left_out[1]), int(left_out[2]) + 1))
    assert {0, table.num_ticks - 1} <= set(shown)
    assert set(cells(drawn(table, width=80))) == set(range(table.num_ticks))


def test_a_terminal_narrower_than_a_tick_gets_a_tick_a_block():
    table = schedule_table("zb", 2, 3)
    assert len(cells(drawn(table, width=5))) == table.num_ticks


def test_dots_where_there_is_no_unicode():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_timeline(schedule_table("1f1b", 2, 1), Console(file=file, width=80))
    file.seek(0)
    assert file.read().splitlines()[2] == "stage 1  ..  F0 B0  .."


def test_rows_and_the_best_of_them():
    file = io.StringIO()
    print_comparison(["a", "b"], [["x", "1"], ["[y]", "22"]], {1}, Console(file=file, width=80))
    assert [line.rstrip() for line in file.getvalue().splitlines()] == ["a       b", "x       1", "[y] *  22"]
    file = io.StringIO()
    print_comparison(
        ["a", "b"], [["x", "1"], ["[y]", "22"]], {1}, Console(file=file, width=80, force_terminal=True, color_system="standard")
    )
    assert "\x1b[1;32m[y] *" in file.getvalue()


def test_colours_tell_kinds_and_chunks_apart():
    colours = {shade(kind, local, 4) for kind in KINDS for local in range(4)}
    assert len(colours) == 12
    assert all(sum(shade(kind, 0, 4)) < sum(shade(kind, 3, 4)) for kind in KINDS)
    assert shade("F", 0, 1) == shade("F", 0, 4)
    assert (ink((0, 0, 0)), ink((255, 255, 255))) == ((255, 255, 255), (0, 0, 0))
