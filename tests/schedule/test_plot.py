"""The picture of a schedule over time: every item, with its duration."""

import pytest
from matplotlib.axes import Axes

from jgt.schedule import plot as module
from jgt.schedule.plot import plot
from jgt.schedule.schedules import SCHEDULES, schedule_table
from jgt.schedule.simulate import Costs, simulate
from jgt.schedule.timeline import shade


@pytest.fixture
def bars(monkeypatch):
    """The drawn bars, each as (start, length, middle, colour), and the texts."""
    seen, texts = [], []
    bar, text = Axes.broken_barh, Axes.text

    def _bar(self, spans, y, facecolors, **options):
        colours = [facecolors] * len(spans) if isinstance(facecolors, str) else facecolors
        seen.extend((start, length, y[0] + y[1] / 2, colour) for (start, length), colour in zip(spans, colours, strict=True))
        return bar(self, spans, y, facecolors=facecolors, **options)

    def _text(self, x, y, s, *rest, **options):
        texts.append((x, y, s))
        return text(self, x, y, s, *rest, **options)

    monkeypatch.setattr(Axes, "broken_barh", _bar)
    monkeypatch.setattr(Axes, "text", _text)
    return seen, texts


def is_png(path):
    data = path.read_bytes()
    return data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_png_of_every_schedule(name, tmp_path):
    table = schedule_table(name, 3, 5)
    plot(table, simulate(table), tmp_path / "a.png")
    assert is_png(tmp_path / "a.png")


def test_items_are_where_their_slots_are(bars, tmp_path):
    table = schedule_table("zb", 2, 3)
    simulation = simulate(table, Costs(forward=1, backward=2, weight=0.5), (1, 0.5))
    plot(table, simulation, tmp_path / "a.png")
    seen, texts = bars
    colours = {kind: "#{:02x}{:02x}{:02x}".format(*shade(kind, 0, 1)) for kind in ("F", "B", "W")}
    expected = []
    for slot in simulation.slots:
        for stage, item in enumerate(table.rows(slot.kind)[slot.tick]):
            if item is not None:
                length = slot.length * (1, 0.5)[stage]
                expected.append((slot.start, length, stage, colours[slot.kind]))
                assert (slot.start + length / 2, stage, str(item.microbatch)) in texts
    idle = [(0, simulation.time, stage, module._IDLE) for stage in range(2)]
    assert sorted(seen) == sorted(expected + idle)


def test_numbers_that_do_not_fit_are_left_out(bars, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_INCHES", 8.0)
    table = schedule_table("1f1b", 2, 150)
    plot(table, simulate(table), tmp_path / "a.png")
    assert bars[1] == []
    assert len(bars[0]) == 2 * 2 * 150 + 2


def test_weight_gradients_that_cost_nothing_are_not_drawn(tmp_path, bars):
    table = schedule_table("zb", 2, 2)
    plot(table, simulate(table, Costs(weight=0)), tmp_path / "a.png")
    assert len(bars[0]) == 2 * 2 * 2 + 2


def test_a_path_that_cannot_be_written(tmp_path):
    table = schedule_table("1f1b", 1, 1)
    with pytest.raises(FileNotFoundError):
        plot(table, simulate(table), tmp_path / "none" / "a.png")
