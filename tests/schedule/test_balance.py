"""The layers of stages chosen from costs, against brute force over all splits."""

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jgt.document import InputError
from jgt.schedule.__main__ import main
from jgt.schedule.balance import LayerCost, MeasuredCosts, balanced, chosen_sizes, even
from jgt.schedule.schedules import schedule_table
from jgt.schedule.simulate import simulate

COSTS = st.sampled_from([1.0, 1.1, 3.0])


def splits(num_layers, num_chunks):
    for cuts in itertools.combinations(range(1, num_layers), num_chunks - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise([0, *cuts, num_layers]))


def measured(layers, stage=0):
    return MeasuredCosts(layers=tuple(LayerCost(layer=i, stage=stage, forward_ms=c, backward_ms=2 * c) for i, c in enumerate(layers)))


@settings(deadline=None)
@given(st.lists(COSTS, min_size=4, max_size=9), st.lists(COSTS, min_size=2, max_size=4))
def test_the_largest_chunk_is_as_small_as_possible(layers, rates):
    def largest(sizes):
        ends = [0, *itertools.accumulate(sizes)]
        return max(sum(layers[begin:end]) * rate for (begin, end), rate in zip(itertools.pairwise(ends), rates, strict=True))

    sizes = balanced(layers, rates)
    assert sum(sizes) == len(layers) and min(sizes) >= 1
    assert largest(sizes) == pytest.approx(min(map(largest, splits(len(layers), len(rates)))))


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["1f1b", "gpipe", "zb"]),
    st.lists(COSTS, min_size=4, max_size=8),
    st.lists(st.sampled_from([1.0, 2.0]), min_size=2, max_size=3),
    st.integers(4, 9),
)
@example("1f1b", [1.0, 1.1, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 2.0], 4)
def test_the_simulated_step_is_the_shortest_of_all_splits(name, layers, stage_costs, microbatches):
    table, costs = schedule_table(name, len(stage_costs), microbatches, None), measured(layers)

    def time(sizes):
        return simulate(table, None, stage_costs, costs.chunks(table, sizes, stage_costs), ends=0.5).time

    chosen = chosen_sizes(table, len(layers), costs, stage_costs)
    assert time(chosen) == pytest.approx(min(map(time, splits(len(layers), len(stage_costs)))))


def test_measured_chunks_of_equal_layers_take_as_long_as_equal_stages():
    table = schedule_table("zb", 2, 4, None)
    chunks = measured([1, 1, 1, 1]).chunks(table, (2, 2), None)
    # Forward 2 on a whole stage, and half of backward 4 for the gradients of weights.
    assert chunks == [(2, 2, 2)] * 2
    assert simulate(table, chunks=chunks, ends=1).time == 2 * simulate(table).time + 4


def test_a_slow_stage_gets_fewer_layers():
    table = schedule_table("1f1b", 3, 8, None)
    assert chosen_sizes(table, 10, None, (1, 2, 1)) == (4, 2, 4)
    # What the slow stage has measured is divided by its cost.
    of_stages = tuple(
        LayerCost(layer=i, stage=s, forward_ms=c, backward_ms=c) for i, (s, c) in enumerate([(0, 1)] * 4 + [(1, 2)] * 2 + [(2, 1)] * 4)
    )
    assert chosen_sizes(table, 10, MeasuredCosts(layers=of_stages), (1, 2, 1)) == (4, 2, 4)


def test_equal_chunks_have_the_layers_that_are_left_over_first():
    assert even(7, 4) == (2, 2, 2, 1)


def test_a_run_is_read_and_its_costs_are_used(tmp_path, capsys):
    folder = tmp_path / "profile"
    folder.mkdir()
    row = {"stage": 0, "backward_ms": 2.0}
    for process, layers in enumerate(([(0, 3.0), (1, 1.0)], [(2, 1.0), (3, 1.0)])):
        rows = [{"layer": layer, "forward_ms": ms, **row} for layer, ms in layers]
        (folder / f"costs-{process}.json").write_text(json.dumps({"layers": rows, "ends_ms": 0.5}))
    command = ["1f1b", "--stages", "2", "--microbatches", "4", "--costs", str(tmp_path)]
    assert main(command) == 0
    assert "Layers of each chunk: 2, 2. In milliseconds" in capsys.readouterr().out
    assert main([*command, "--json", "--stage-costs", "4,1"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == [1, 3]
    assert main([*command[:2], "8", *command[3:]]) == 2
    assert "4 measured layers cannot be split into 8 chunks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no measured costs of layers. Profile a step"),
        ({"costs-0.json": '{"layers": [{"layer": 1, "stage": 0, "forward_ms": 1, "backward_ms": 1}]}'}, "lacks the costs of some layers"),
        ({"costs-0.json": '{"layers": [{"layer": 0, "stage": 0, "forward_ms": -1, "backward_ms": 1}]}'}, "forward_ms: -1.0 is too small"),
        ({"costs-0.json": "[["}, "costs-0.json:1"),
    ],
)
def test_costs_that_cannot_be_used_are_an_error(tmp_path, files, message):
    (tmp_path / "profile").mkdir()
    for name, text in files.items():
        (tmp_path / "profile" / name).write_text(text)
    with pytest.raises(InputError) as error:
        MeasuredCosts.read(tmp_path, "here")
    assert message in str(error.value)
