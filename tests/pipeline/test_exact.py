"""With every schedule, mesh and set of options, the loss and every gradient are the same as on one device."""

import copy
import itertools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import RULES, assert_close, assert_exact, assert_trained, case, decoder_loss, make_batch, make_params, mesh_of

from jgt.schedule.schedules import SCHEDULES

MESHES = [
    {"stage": stage, "tensor": tensor, "data": data}
    for stage, tensor, data in itertools.product((2, 4), (1, 2), (1, 2))
    if stage * tensor * data <= 8
]


def name_of(values):
    return "-".join(f"{name}{value}" for name, value in values.items())


@pytest.fixture(scope="module")
def decoder():
    """The case of a decoder with a number of layers, and of a batch with a number of rows."""
    known = {}

    def _decoder(num_layers, num_rows=16):
        key = (num_layers, num_rows)
        if key not in known:
            known[key] = case(decoder_loss, make_params(num_layers), make_batch(num_rows))
        return known[key]

    return _decoder


def grid():
    """Every schedule on every mesh. Two meshes are not slow: the most stages alone, and two stages with both other axes."""
    for schedule in SCHEDULES:
        for sizes in MESHES:
            is_corner = min(sizes.values()) == 2 or sizes == {"stage": 4, "tensor": 1, "data": 1}
            yield pytest.param(schedule, sizes, id=f"{schedule}-{name_of(sizes)}", marks=() if is_corner else pytest.mark.slow)


@pytest.mark.parametrize(("schedule", "sizes"), list(grid()))
def test_every_schedule_on_every_mesh(decoder, schedule, sizes):
    # Forward only is another program, of which one mesh for each schedule will do.
    check = assert_exact if sizes == {"stage": 2, "tensor": 2, "data": 2} else assert_trained
    check(decoder(8), mesh_of(**sizes), schedule=schedule)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"stage": 2, "fsdp": 2, "tensor": 2}, {}),
        ({"stage": 2, "fsdp": 2, "tensor": 2}, {"schedule": "zb", "remat": "stage", "gather": "layer"}),
        ({"data": 2, "fsdp": 2, "stage": 2}, {"schedule": "interleaved"}),
        ({"data": 2, "fsdp": 2, "stage": 2}, {"gather": "layer", "remat": "layer"}),
    ],
    ids=name_of,
)
def test_parameters_that_are_sharded_over_the_batch_s_axes(decoder, sizes, options):
    assert_exact(decoder(4), mesh_of(**sizes), **options)


@pytest.mark.parametrize(
    ("num_layers", "options"),
    [
        pytest.param(4, {"schedule": "1f1b", "idle": "compute"}, marks=pytest.mark.slow),
        (5, {"schedule": "zb", "remat": "stage", "idle": "skip"}),
        pytest.param(8, {"schedule": "interleaved", "gather": "layer", "idle": "skip"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stages_without_a_microbatch_compute_or_skip(decoder, num_layers, options):
    assert_exact(decoder(num_layers), mesh_of(data=2, fsdp=2, stage=2), **options)


def split_sequence(vocab):
    """The decoder with the sequence split between its parts, and the rows of the embedding's table over these axes."""
    rules = copy.deepcopy(RULES)
    rules["signals"]["embed"] |= {"params": {"embed": [vocab, None]}, "out": ["batch", "tensor", None]}
    rules["signals"]["layers/mlp"]["out"] = ["batch", "tensor", None]
    return case(decoder_loss, make_params(6), make_batch(), rules=rules)


TABLE = ["stage", "tensor", "fsdp"]


@pytest.mark.parametrize(
    ("vocab", "sizes", "options"),
    [
        (TABLE, {"fsdp": 2}, {"schedule": "interleaved", "virtual": 3}),
        (["tensor"], {"data": 2}, {"schedule": "1f1b"}),
        *(
            pytest.param(vocab, {axis: 2}, {"schedule": schedule}, marks=pytest.mark.slow)
            for vocab, axis, schedule in itertools.product((TABLE, ["tensor"], ["tensor", "fsdp"], ["stage"]), ("data", "fsdp"), SCHEDULES)
        ),
    ],
    ids=str,
)
def test_a_sequence_that_is_split_between_layers(vocab, sizes, options):
    assert_exact(split_sequence(vocab), mesh_of(stage=2, tensor=2, **sizes), **options)


@pytest.mark.parametrize(("schedule", "remat"), [("1f1b", "layer"), ("zb", "stage")])
def test_what_is_recomputed_is_the_same(decoder, schedule, remat):
    assert_trained(decoder(8), mesh_of(stage=2, tensor=2, data=2), schedule=schedule, remat=remat)


@pytest.mark.parametrize(
    ("stage", "microbatches", "schedule"),
    [
        (4, 2, "zigzag"),
        (4, 6, "1f1b"),
        (4, 6, "interleaved"),
        (4, 1, "gpipe"),
        (2, 1, "zb_interleaved"),
    ],
)
def test_fewer_microbatches_than_stages_or_no_multiple_of_them(decoder, stage, microbatches, schedule):
    assert_trained(decoder(8, 12), mesh_of(stage=stage, data=2), schedule=schedule, microbatches=microbatches)


@pytest.mark.parametrize(
    ("num_layers", "stage", "options"),
    [
        (5, 4, {"schedule": "zb", "remat": "stage"}),
        (7, 2, {"schedule": "interleaved", "virtual": 3}),
        (5, 2, {"schedule": "zigzag", "remat": "layer"}),
        (6, 4, {"schedule": "gpipe", "gather": "layer"}),
    ],
    ids=str,
)
def test_layers_that_the_chunks_do_not_divide(decoder, num_layers, stage, options):
    assert_trained(decoder(num_layers), mesh_of(stage=stage, fsdp=2), **options)


@pytest.mark.parametrize("options", [{"schedule": "interleaved", "virtual": 3}, {"schedule": "zb"}], ids=str)
def test_one_stage_is_a_pipeline_too(decoder, options):
    assert_trained(decoder(8), mesh_of(stage=1, data=2, tensor=2), **options)


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "zb_interleaved", "virtual": 1}], ids=str)
def test_one_layer_for_each_stage(decoder, options):
    assert_trained(decoder(4), mesh_of(stage=4, tensor=2), **options)


def test_a_pipeline_where_x64_is_enabled():
    with jax.enable_x64(True):
        wide = case(decoder_loss, jax.tree.map(np.float64, make_params()), make_batch())
        value, gradients = wide.derivatives(wide.pipelined(mesh_of(stage=2, data=2), schedule="zb"))
        assert gradients["embed"].dtype == np.float64
        np.testing.assert_allclose(value, wide.expected[0], rtol=1e-12)
        assert_close(gradients, wide.expected[1], 1e-12)


def one_by_one(stages, backward):
    """A table with one item per tick: all forward passes, then the backward passes with the microbatches in another order."""
    last = len(stages) - 1
    forward = [("F", m, g) for m in range(len(backward)) for g in range(last + 1)]
    items = [*forward, *(("B", m, g) for m in backward for g in range(last, -1, -1))]
    rows = [["-"] * (max(stages) + 1) for _ in items]
    for row, (kind, m, g) in zip(rows, items, strict=True):
        row[stages[g]] = f"{kind}{m}.{g}"
    return "\n".join(map(",".join, rows))


TABLES = {
    "reversed stages, weight gradients late": (
        2,
        "-,F0.0\nF0.1,F1.0\nF1.1,-\nB0.1,-\nB1.1 W0.1,B0.0\nW1.1,B1.0 W0.0\n-,W1.0\n",
    ),
    "neighbours on one stage": (4, one_by_one((0, 0, 1, 1), [1, 3, 0, 2])),
    "chunks anywhere": (2, one_by_one((1, 3, 0, 2, 2, 3, 1, 0), [1, 0])),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_one_s_own(decoder, tmp_path, name):
    microbatches, text = TABLES[name]
    (tmp_path / "own.csv").write_text(text)
    stage = text.splitlines()[0].count(",") + 1
    assert_trained(decoder(8), mesh_of(stage=stage, data=2), schedule=str(tmp_path / "own.csv"), microbatches=microbatches)


@st.composite
def pipelines(draw):
    """A number of layers, axes and options that fit together."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    stage = draw(st.sampled_from([1, 2, 4]))
    virtual = draw(st.integers(1, 3)) if SCHEDULES[schedule].virtual is None else None
    num_layers = draw(st.integers(stage * (SCHEDULES[schedule].virtual or virtual), 12))
    data = draw(st.sampled_from([1, 2]))
    sizes = {"stage": stage, "data": data, "tensor": draw(st.sampled_from([1, 2] if stage * data <= 4 else [1]))}
    microbatches = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 12) if 12 // data % n == 0]))
    remat = draw(st.sampled_from(["none", "layer", "stage"]))
    return num_layers, sizes, {"schedule": schedule, "virtual": virtual, "microbatches": microbatches, "remat": remat}


@pytest.mark.slow
@given(pipelines())
@settings(max_examples=3, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
def test_sampled_pipelines(decoder, sampled):
    num_layers, sizes, options = sampled
    assert_trained(decoder(num_layers, 12), mesh_of(**sizes), **options)
