"""Each device of a stage sends its part of what travels, in its own type, and as often as the schedule says."""

import jax
import jax.numpy as jnp
import pytest
from models import RULES, assert_trained, case, decoder_loss, make_batch, make_params, mesh_of
from plugin import needs_plugin

import jgt
from jgt.pipeline.layer import Body
from jgt.pipeline.wire import split_further
from jgt.planner.chip import parse_target
from train.config import load
from train.plan.make import make_plan

SIZES = {"tensor": 4, "expert": 2}
WHOLE = ((), (), ())


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ((2, 16, 8), WHOLE, ((), ("tensor", "expert"), ())),
        ((2, 6, 8), WHOLE, ((), (), ("tensor", "expert"))),
        ((8, 3, 5), WHOLE, (("tensor", "expert"), (), ())),
        ((2, 3, 5), WHOLE, WHOLE),
        ((2, 16, 8), ((), ("tensor",), ()), ((), ("tensor", "expert"), ())),
        ((2, 4, 8), ((), ("tensor",), ()), ((), ("tensor",), ("expert",))),
        ((2, 16, 8), ((), ("expert",), ("tensor",)), ((), ("expert",), ("tensor",))),
        ((), (), ()),
    ],
)
def test_the_axes_of_a_stage_split_the_first_dim_behind_the_rows_that_they_divide(shape, dims, expected):
    assert split_further(shape, dims, ("tensor", "expert"), SIZES) == expected


# -- values that the rules split within a stage -------------------------------------------------------------------

SEQUENCE = RULES | {
    "signals": RULES["signals"]
    | {
        "embed": RULES["signals"]["embed"] | {"out": ["batch", "tensor", None]},
        "layers/mlp": RULES["signals"]["layers/mlp"] | {"out": ["batch", "tensor", None]},
    }
}


def gathers(rules, mesh):
    """The number of all-gathers within stages in a step."""
    fn = jgt.shard(decoder_loss, jgt.make_rules(rules), mesh, pipeline=jgt.Pipeline(signal="layers", microbatches=4))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (make_params(), make_batch()))
    found = jgt.plan(jax.value_and_grad(fn), *shapes).collectives
    return sum(c.count for c in found if (c.kind, c.axes) == ("all-gather", ("tensor",)))


def test_what_the_rules_split_within_a_stage_stays_split(monkeypatch):
    mesh = mesh_of(stage=2, tensor=2)
    assert_trained(case(rules=SEQUENCE), mesh)
    # Which signal a gather has differs between versions of JAX, so the same program is counted with values that travel whole.
    split = gathers(SEQUENCE, mesh)
    monkeypatch.setattr(Body, "travel_dims", lambda _, shapes, axes: [((),) * len(x.shape) for x in shapes])
    # 5 ticks have a forward item, and as many a backward item; each sends in all but the last.
    assert split + 2 * 4 <= gathers(SEQUENCE, mesh)


def test_half_precision_travels_as_it_is_on_cpus_too():
    def halved(params, batch):
        return decoder_loss(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch).astype(jnp.float32)

    for sizes in ({"stage": 4, "data": 2}, {"stage": 2, "tensor": 2}):
        found = jax.jit(jgt.shard(halved, jgt.make_rules(RULES), mesh_of(**sizes), pipeline=jgt.Pipeline(signal="layers", microbatches=4)))
        assert float(found(make_params(), make_batch())) == pytest.approx(float(halved(make_params(), make_batch())), rel=1e-2)


# -- traffic between stages ---------------------------------------------------------------------------------------

STAGES, TENSOR, MICROBATCHES, BATCH, SEQ, EMBED = 2, 4, 8, 16, 64, 64


@needs_plugin
@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("1f1b", None),
        pytest.param("interleaved", 3, marks=pytest.mark.slow),
        pytest.param("interleaved", 2, marks=pytest.mark.slow),
        pytest.param("zb", None, marks=pytest.mark.slow),
    ],
)
def test_bytes_between_stages_are_those_of_the_formula(schedule, virtual):
    small = [
        f"mesh={{data: 1, fsdp: 1, stage: {STAGES}, tensor: {TENSOR}}}",
        f"pipeline={{signal: layers, schedule: {schedule}, virtual: {virtual or 'null'}, microbatches: {MICROBATCHES}}}",
        *(
            f"model.layers={STAGES * (virtual or 1)}",
            "model.heads=4",
            "model.ffn=128",
            f"model.embed={EMBED}",
            f"model.seq={SEQ}",
            f"train.batch={BATCH}",
        ),
        *("model.dtype=bf16", "model.attention=xla", "devices.virtual_cpu=8"),
    ]
    plan = make_plan(load("configs/pipeline.yaml", small), parse_target("h100:1x8"), None)
    part = BATCH // MICROBATCHES * SEQ * EMBED * 2 // TENSOR
    between = [c for c in plan.collectives if c.axes == ("stage",) and c.signal == "pipeline"]
    assert {c.dtype for c in between} == {"bf16"}
    for phase in ("forward", "backward"):
        sent, shown = (
            sum(c.bytes * c.count for c in between if (c.kind, c.phase) == (kind, phase)) for kind in ("collective-permute", "all-reduce")
        )
        # XLA drops the last send where the last tick is a loop of its own: nobody reads it.
        unread = 0 if phase == "forward" else part
        formula = (MICROBATCHES * (virtual or 1) + STAGES - 1) * part
        assert formula - unread <= sent <= formula
        # As an all-reduce of n devices: 2 (n - 1) / n of a part. A tick more shows what entered: it is not worth a branch.
        assert MICROBATCHES * part <= shown <= (MICROBATCHES + STAGES - 1) * part
    assert {c.kind for c in between} == {"collective-permute", "all-reduce"}
