"""Matmuls of groups of rows, compared with every group's matrix on every row in f64: values and gradients."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from plugin import needs_plugin

import jgt
from jgt.planner.described import devices_of
from jgt.planner.hardware.target import Target
from jgt.planner.plan import plan
from jgt.program.tracing import evaluate
from jgt.replacements.experts.grouped import block_rows, by_blocks, by_mosaic, grouped, mosaic_obstacle, with_grouped_matmuls
from train.models import eight_bits
from train.models.config import ModelConfig
from train.models.decoder import build
from train.models.experts.config import ExpertsConfig
from train.setup.xla import PRESETS

HAS_HOPPER = any(d.platform == "gpu" and getattr(d, "compute_capability", "") == "9.0" for d in jax.devices())


def arrays(n, sizes, k, m, dtype=jnp.float32):
    """Rows, weights and cotangents; those behind the last group are NaN."""
    rng = np.random.default_rng(0)
    behind = np.arange(n)[:, None] >= sum(sizes)
    rows, cotangent = (jnp.asarray(np.where(behind, np.nan, rng.normal(size=(n, width))), dtype) for width in (k, m))
    return rows, jnp.asarray(rng.normal(size=(len(sizes), k, m)), dtype), cotangent


def reference(rows, sizes, weights, cotangent):
    """The results of the rows that are in groups, and the gradients, in f64."""
    rows, weights, cotangent = (np.asarray(x, np.float64) for x in (rows, weights, cotangent))
    ends = np.cumsum(sizes)
    results, by_rows, by_weights = [], [], []
    for group, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        results.append(rows[begin:end] @ weights[group])
        by_rows.append(cotangent[begin:end] @ weights[group].T)
        by_weights.append(rows[begin:end].T @ cotangent[begin:end])
    return np.concatenate(results), np.concatenate(by_rows), np.stack(by_weights)


def run(matmul, rows, sizes, weights, cotangent):
    """What `reference` returns."""

    @jax.jit
    def both(rows, sizes, weights, cotangent):
        results, pull = jax.vjp(lambda rows, weights: matmul(rows, sizes, weights), rows, weights)
        return results, *pull(cotangent)

    results, by_rows, by_weights = both(rows, jnp.asarray(sizes, jnp.int32), weights, cotangent)
    return results[: sum(sizes)], by_rows[: sum(sizes)], by_weights


def assert_close(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert np.max(np.abs(np.asarray(a, np.float64) - b)) <= tolerance * np.max(np.abs(b))


def replaced(rows, sizes, weights):
    """`jax.lax.ragged_dot` as the function of an expert has it."""
    program = jax.make_jaxpr(jax.lax.ragged_dot)(rows, weights, sizes)
    return evaluate(with_grouped_matmuls(program), (rows, weights, sizes))[0]


def test_a_ragged_dot_and_its_derivative_are_replaced():
    rows, weights, cotangent = arrays(96, (33, 0, 32, 5), 24, 40)
    assert_close(run(replaced, rows, (33, 0, 32, 5), weights, cotangent), reference(rows, (33, 0, 32, 5), weights, cotangent), 2e-6)
    sizes = jnp.array([33, 0, 32, 5])
    trained = jax.make_jaxpr(jax.grad(lambda rows, weights: jnp.sum(replaced(rows, sizes, weights)), (0, 1)))(rows, weights)
    assert "ragged_dot" not in str(trained) and "while" in str(trained)


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (96, (24, 24, 24, 24)),
        (96, (1, 40, 55, 0)),
        # Empty groups at both ends, and all rows of one group.
        (96, (0, 0, 96, 0)),
        (96, (96,)),
        # Rows behind the last group.
        (96, (33, 0, 32, 5)),
        (96, (0, 0, 0, 3)),
        # Fewer rows than a block has.
        (8, (3, 0, 5)),
        (8, (1, 1, 1)),
        (259, (70, 31, 1, 157)),
    ],
)
def test_blocks_are_exact(n, sizes):
    rows, weights, cotangent = arrays(n, sizes, 24, 40)
    found = run(by_blocks, rows, sizes, weights, cotangent)
    assert_close(found, reference(rows, sizes, weights, cotangent), 2e-6)


def test_no_rows_at_all():
    rows, weights, cotangent = arrays(32, (0, 0), 8, 16)
    _, _, by_weights = run(by_blocks, rows, (0, 0), weights, cotangent)
    assert not np.any(by_weights)


def test_blocks_in_bf16_sum_in_f32():
    rows, weights, cotangent = arrays(512, (100, 412), 24, 40, jnp.bfloat16)
    found = run(by_blocks, rows, (100, 412), weights, cotangent)
    assert found[2].dtype == jnp.bfloat16
    # Each result is rounded once, the sums of 13 blocks too.
    assert_close(found, reference(rows, (100, 412), weights, cotangent), 2**-8)


def test_blocks_inside_a_shard_map_and_a_loop():
    mesh = jgt.make_mesh({"expert": 4, "tensor": 2})
    sizes = (9, 30)
    rows, weights, cotangent = arrays(48, sizes, 24, 40)
    whole = [jnp.concatenate([x] * 4) for x in (rows, weights, cotangent)]

    def on_device(rows, weights, cotangent):
        made = jnp.asarray(sizes, jnp.int32)
        step = lambda _, state: jax.vjp(lambda r, w: by_blocks(r, made, w), rows, state)[1](cotangent)[1]  # noqa: E731
        return jax.lax.fori_loop(0, 2, step, weights)

    # The tensor axis is XLA's.
    mapped = jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), axis_names={"expert"}, check_vma=False)
    )
    expected = reference(rows, sizes, weights, cotangent)[2]
    assert_close([mapped(*whole)], [np.concatenate([expected] * 4)], 2e-6)


@pytest.mark.parametrize(("n", "groups", "rows"), [(4096, 8, 64), (4096, 64, 32), (1 << 20, 2, 512), (8, 4, 8)])
def test_the_rows_of_a_block(n, groups, rows):
    assert block_rows(n, groups) == rows


def test_a_plan_counts_the_blocks_to_expect_and_of_them_the_rows_that_are_there():
    rows, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 16), (8, 16, 32)))
    found = plan(by_blocks, rows, jax.ShapeDtypeStruct((8,), jnp.int32), weights)
    assert found.model_flops_per_device == 2 * 4096 * 16 * 32
    assert found.flops_per_device == 2 * (4096 + 8 * 64 // 2) * 16 * 32
    assert not found.findings


# -- eight bits --------------------------------------------------------------------------------------------------------

EIGHT = dict(zip((jnp.float8_e4m3fn, jnp.float8_e5m2), (2**-4, 2**-3), strict=True))
"""The largest relative error of a rounding."""


def rounded(x, dtype, over):
    """x in eight bits, by numpy, with a scale for these dims."""
    scale = np.abs(x).max(axis=over, keepdims=True) / float(jnp.finfo(dtype).max)
    return np.asarray(x / scale, dtype).astype(np.float64) * scale


def in_eight_bits(rows, sizes, weights):
    program = jax.make_jaxpr(eight_bits.ragged_dot)(rows, weights, sizes)
    return evaluate(with_grouped_matmuls(program), (rows, weights, sizes))[0]


def test_matmuls_in_eight_bits_are_those_of_rounded_sides():
    sizes = (50, 0, 20, 30)
    rows, weights, cotangent = arrays(128, sizes, 16, 32)
    found = run(in_eight_bits, rows, sizes, weights, cotangent)
    x, w, c = (np.asarray(side, np.float64) for side in (rows, weights, cotangent))
    x[sum(sizes) :], c[sum(sizes) :] = 1, 1
    e4m3, e5m2 = EIGHT
    sides = rounded(x, e4m3, 1), sizes, rounded(w, e4m3, (1, 2)), rounded(c, e5m2, 1)
    results, by_rows, _ = reference(*sides)
    assert_close(found[:2], (results, by_rows), 1e-5)
    # Each of a sum's terms has both errors.
    exact = reference(x, sizes, w, c)[2]
    size = reference(np.abs(x), sizes, w, np.abs(c))[2]
    assert np.all(np.abs(found[2] - exact) <= 1.1 * sum(EIGHT.values()) * size + 1e-6)
    assert np.any(np.abs(found[2] - exact) > 1e-3)


@pytest.mark.slow
def test_a_row_in_eight_bits_does_not_depend_on_the_rows_beside_it():
    rows, weights, _ = arrays(64, (40, 20), 16, 32)
    one = in_eight_bits(rows, jnp.array([40, 20]), weights)
    other = in_eight_bits(rows.at[1:40].multiply(1e3), jnp.array([40, 20]), weights)
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[40:60], other[40:60])


@pytest.mark.slow
def test_a_model_with_experts_in_eight_bits_is_near_the_model():
    tokens = jnp.arange(16).reshape(2, 8)
    # All experts are chosen: a rounding may change a choice.
    options = {"layers": 2, "embed": 32, "heads": 2, "vocab": 20, "seq": 8, "experts": ExpertsConfig(ffn=16, count=4, choose=4)}
    plain, eight = (build(ModelConfig(fp8=fp8, **options)) for fp8 in (False, True))
    params, variables = plain.init(jax.random.key(0))
    a, b = plain.apply(params, variables, tokens), eight.apply(params, variables, tokens)
    assert 0 < np.linalg.norm(a - b) < 0.2 * np.linalg.norm(a)


@needs_plugin
def test_matmuls_in_eight_bits_are_f8_on_a_gpu():
    mesh = jgt.make_mesh({"one": 1}, devices=devices_of(Target.parse("h100:1x1")))
    where = jax.NamedSharding(mesh, P())
    n, k, m = 4096, 1024, 2048
    shapes = [((n, k), jnp.bfloat16), ((4,), jnp.int32), ((4, k, m), jnp.bfloat16), ((n, m), jnp.bfloat16)]

    def step(rows, sizes, weights, cotangent):
        results, pull = jax.vjp(lambda rows, weights: in_eight_bits(rows, sizes, weights), rows, weights)
        return results, *pull(cotangent)

    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in shapes]
    # As in a run with `model.fp8`.
    assert PRESETS["gpu-fp8"]["xla_gpu_enable_triton_gemm"] == "false"
    text = jax.jit(step).lower(*arguments).compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    targets = re.findall(r'custom_call_target="(__cublas[^"]*|__triton[^"]*)"', text)
    assert targets == ["__cublas$lt$matmul$f8"] * 3


# -- Mosaic's kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kind", "why"),
    [
        (jnp.bfloat16, "NVIDIA H100 80GB HBM3", ""),
        (jnp.bfloat16, "NVIDIA GH200 480GB", ""),
        (jnp.float32, "NVIDIA H100 80GB HBM3", "need bf16"),
        (jnp.bfloat16, "NVIDIA A100-SXM4-80GB", "not for NVIDIA A100"),
        (jnp.bfloat16, "NVIDIA B200", "not for NVIDIA B200"),
        (jnp.bfloat16, "cpu", "no NVIDIA GPU"),
        (jnp.bfloat16, None, "no NVIDIA GPU"),
    ],
)
def test_mosaics_kernels_are_for_bf16_on_hopper(dtype, kind, why):
    obstacle = mosaic_obstacle(dtype, None if kind is None else types.SimpleNamespace(device_kind=kind))
    assert why in obstacle and bool(why) == bool(obstacle)


@pytest.mark.slow
@needs_plugin
def test_mosaics_kernels_compile_for_a_gpu_that_is_not_there():
    mesh = jgt.make_mesh({"one": 1}, devices=devices_of(Target.parse("h100:1x1")))
    assert not mosaic_obstacle(jnp.bfloat16, mesh.devices.flat[0])
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((512, 128), jnp.bfloat16), ((4,), jnp.int32), ((4, 128, 256), jnp.bfloat16))]

    def step(rows, sizes, weights):
        results, pull = jax.vjp(lambda rows, weights: by_mosaic(rows, sizes, weights), rows, weights)
        return results, *pull(results)

    found = plan(step, *shapes, target="h100:1x1")
    # Three matmuls, none of them dense.
    assert found.flops_per_device == found.model_flops_per_device == 3 * 2 * 512 * 128 * 256
    assert sum(row.flops for row in found.signals) == found.flops_per_device
    assert not found.findings


@needs_plugin
def test_a_plan_gives_mosaics_kernels_the_time_of_dense_matmuls_of_their_size():
    rows, sizes, weights = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32), (4, 1024, 2048)
    grouped_plan = plan(by_mosaic, rows, sizes, jax.ShapeDtypeStruct(weights, jnp.bfloat16), target="h100:1x1")
    dense_plan = plan(jnp.matmul, rows, jax.ShapeDtypeStruct(weights[1:], jnp.bfloat16), target="h100:1x1")
    assert grouped_plan.step_time_ms == pytest.approx(dense_plan.step_time_ms, rel=0.5)


@needs_plugin
def test_mosaics_kernels_compile_on_the_devices_of_a_mesh():
    mesh = jgt.make_mesh({"expert": 8}, devices=devices_of(Target.parse("h100:1x8")))
    spec = P("expert")
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((2048, 128), jnp.bfloat16), ((16,), jnp.int32), ((16, 128, 128), jnp.bfloat16))]

    def step(rows, sizes, weights):
        return jax.vjp(lambda weights: grouped(rows, sizes, weights), weights)[1](rows)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=(spec,), check_vma=False)
    found = plan(
        mapped, *(jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=jax.NamedSharding(mesh, spec)) for s in shapes), target="h100:1x8"
    )
    # Nobody needs the matmul of the forward pass, nor the gradient of the rows.
    assert found.flops_per_device == 2 * 256 * 128 * 128
    assert not found.findings


@needs_plugin
@pytest.mark.parametrize("shape", [(64, 128, 128), (512, 96, 128), (512, 128, 96)])
def test_arrays_without_whole_tiles_are_computed_by_blocks(shape):
    n, k, m = shape
    with jax.sharding.use_abstract_mesh(jgt.make_mesh({"one": 1}, devices=devices_of(Target.parse("h100:1x1"))).abstract_mesh):
        program = jax.make_jaxpr(grouped)(jnp.ones((n, k), jnp.bfloat16), jnp.array([n]), jnp.ones((1, k, m), jnp.bfloat16))
    assert "mpmd_map" not in str(program)


@pytest.mark.skipif(not HAS_HOPPER, reason="there is no Hopper")
@pytest.mark.parametrize("sizes", [(300, 0, 212), (0, 512, 0), (130, 40, 60)])
def test_mosaics_kernels_are_exact(sizes):
    rows, weights, cotangent = arrays(512, sizes, 128, 256, jnp.bfloat16)
    found = run(by_mosaic, rows, sizes, weights, cotangent)
    assert_close(found, reference(rows, sizes, weights, cotangent), 2**-8)
