"""Planted faults are reported, each with its signal and its line. Without a fault, nothing is reported."""

import inspect
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import NamedSharding
from plugin import needs_plugin
from small_transformers import RULES, SEQ, Transformer, cross_entropy

import jgt
from jgt import document
from jgt.planner.hardware.target import Target
from jgt.planner.plan import plan
from jgt.signal import context
from train.config import load
from train.plan.make import make_plan

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = CONFIGS.parent / "train" / "models"
GPUS = "h100:1x8"
TARGETS = [None, pytest.param(GPUS, marks=needs_plugin)]
SMALL = {"kind": "llama", "layers": 1, "embed": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 1024, "seq": 64}
MESHES = {"fsdp_tensor": {"data": 1, "fsdp": 2, "tensor": 4}, "sequence": {"data": 2, "tensor": 4}, "zero1": {"data": 8}}


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly():
    """Turns off the last passes of XLA on CPU, which change nothing that these tests look at."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def place(source):
    """The file and the line in a plan's file:line."""
    path, _, line = source.rpartition(":")
    return Path(path).resolve(), int(line)


def line_of(where, text):
    """The file and the number of the only line that contains a text, in a function, a file, or the files of a folder."""
    if callable(where):
        sources = [(Path(__file__), *inspect.getsourcelines(where))]
    else:
        sources = [(path, path.read_text().splitlines(), 1) for path in ([where] if where.is_file() else where.glob("*.py"))]
    (found,) = [(path, first + n) for path, lines, first in sources for n, line in enumerate(lines) if text in line]
    return found


def only(found, kind, signal):
    """The only finding of a kind under a signal."""
    (one,) = [f for f in found.findings if (f.kind, f.signal) == (kind, signal)]
    assert one.text.startswith(f"{one.source}: {signal}: ")
    return one


def spec(mesh, *entries):
    """A sharding."""
    return NamedSharding(mesh, P(*entries))


def array(*shape):
    """The shape of an f32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# ------------------------------------------------------------------------------------------------------- experts


def loss_of_groups(weights, rows, sizes):
    with context("moe"):
        return jnp.sum(jax.lax.ragged_dot(rows, weights, sizes) ** 2)


@needs_plugin
def test_a_ragged_dot_is_dense_on_gpus():
    operands = array(4, 64, 128), array(256, 64), jax.ShapeDtypeStruct((4,), jnp.int32)
    found = plan(jax.grad(loss_of_groups), *operands, target="h100:1x1")
    one = only(found, "dense-experts", "moe")
    assert place(one.source) == line_of(loss_of_groups, "ragged_dot")
    # Two matmuls, each for all four groups.
    assert "4.0 times the FLOPs (0.0336 instead of 0.00839 GFLOP on each device)" in one.text
    assert found.flops_per_device == 2 * 2 * 256 * 64 * 128
    assert [f.kind for f in found.findings] == ["dense-experts"]


# ---------------------------------------------------------------------------------------------- constraints of one's own


@pytest.mark.parametrize("target", TARGETS)
def test_an_indivisible_constraint(target):
    mesh = jgt.make_mesh({"data": 2, "tensor": 4})

    def fn(x):
        with context("mlp"):
            halves = jax.lax.with_sharding_constraint(x, spec(mesh, "data", None))
            return jax.lax.with_sharding_constraint(halves + 1, spec(mesh, None, "tensor"))

    one = only(plan(fn, array(16, 6), target=target), "indivisible", "mlp")
    assert place(one.source) == line_of(fn, '"tensor"')
    assert "dim 1 of a tensor [16, 6] has size 6, which tensor=4 does not divide" in one.text
    assert one.bytes == 16 * 2 * 4


def test_an_involuntary_full_rematerialization(capfd):
    mesh = jgt.make_mesh({"a": 2, "b": 2, "c": 2})

    def fn(x):
        with context("mlp"):
            x = jax.lax.with_sharding_constraint(jnp.sin(x), spec(mesh, "c", "a"))
            return jax.lax.with_sharding_constraint(jnp.cos(x), spec(mesh, None, ("a", "b", "c")))

    found = plan(fn, array(16, 64))
    assert capfd.readouterr() == ("", "")
    (row,) = found.rematerializations
    one = only(found, "rematerialization", "mlp")
    assert row.signal == "mlp" and row.source == one.source and row.shape.startswith("f32[8,32]")
    assert place(one.source) == line_of(fn, "jnp.sin")
    assert row.before in one.text and row.after in one.text


def test_the_same_order_of_axes_on_both_sides_is_no_rematerialization():
    mesh = jgt.make_mesh({"a": 2, "b": 2, "c": 2})

    def fn(x):
        with context("mlp"):
            x = jax.lax.with_sharding_constraint(jnp.sin(x), spec(mesh, None, ("a", "b")))
            return jax.lax.with_sharding_constraint(jnp.cos(x), spec(mesh, None, ("a", "b", "c")))

    found = plan(fn, array(16, 64))
    assert not found.rematerializations and not found.findings


# ---------------------------------------------------------------------------------------------- rules


def unchanged(rules):
    """Leaves the rules as they ship."""


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Plans a small run with a shipped rules file, of which a part is changed."""

    def _planned(rules, change=unchanged, target=None, **model):
        folder = tmp_path_factory.mktemp("run")
        changed = document.read(CONFIGS / "rules" / f"{rules}.yaml").plain()
        change(changed)
        (folder / "rules.yaml").write_text(document.dump(changed))
        run = {"run": {"name": "small"}, "model": SMALL | model, "mesh": MESHES[rules], "rules": "rules.yaml", "data": {"source": "stdlib"}}
        (folder / "run.yaml").write_text(document.dump(run | {"train": {"steps": 1, "batch": 8}, "devices": {"virtual_cpu": 8}}))
        return make_plan(load(folder / "run.yaml"), None if target is None else Target.parse(target))

    return _planned


@pytest.fixture(scope="module")
def right(planned):
    """The plan of rules without a fault."""
    return planned("fsdp_tensor")


def test_without_a_fault_nothing_is_found(right):
    assert not right.findings


@pytest.fixture(scope="module")
def replicated(planned):
    """The plan of rules in which the embedding's spec was forgotten."""

    def forget(rules):
        rules["params"]["{embedding,unembedding}"] = []
        del rules["signals"]["embed"]["tensors"], rules["signals"]["embed"]["backward"]

    return planned("fsdp_tensor", forget)


def test_a_replicated_embedding(replicated, right):
    one = only(replicated, "replicated", "embed")
    assert "the parameter params/embed/embedding [1024, 64] is whole on all 8 devices" in one.text
    assert one.bytes == 1024 * 64 * 4
    assert {f.signal for f in replicated.findings if f.kind == "replicated"} == {"embed", "head"}
    # Two tables, with two moments each.
    assert replicated.memory.args_bytes - right.memory.args_bytes == 2 * 3 * one.bytes * 7 / 8


def test_the_line_of_a_replicated_embedding(replicated):
    line = line_of(MODELS, "return self.table()[tokens]")
    assert place(only(replicated, "replicated", "embed").source) == line


@pytest.mark.slow
def test_bf16_is_explained(planned):
    assert not planned("fsdp_tensor", dtype="bf16").findings


def test_optimizer_state_that_is_split_further_is_explained(planned):
    found = planned("zero1")
    assert not found.findings
    assert any(e.formula == "parameters gathered at the start" for e in found.expected)


def test_attention_that_every_device_computes(planned, right):
    """Neither the projections nor the heads are split over tensor."""

    def forget(rules):
        del rules["signals"]["layers/attn"]["tensors"]
        rules["signals"]["layers/attn"]["params"] = {"*_proj/kernel": ["fsdp", None], "out/kernel": [None, "fsdp"]}

    found = planned("fsdp_tensor", forget)
    one = only(found, "computed-alike", "layers/attn")
    assert place(one.source) == line_of(MODELS, "q, k, v = read_by(x, self.q_proj")
    assert attention(found).flops > 3 * attention(right).flops
    assert found.memory.temp_bytes > 1.2 * right.memory.temp_bytes


@pytest.mark.parametrize("target", [None, pytest.param(GPUS, marks=[needs_plugin, pytest.mark.slow])])
def test_attention_whose_heads_have_no_rule(planned, target):
    """Between blocks the sequence is split, so without a rule inside XLA moves queries, keys and values between two layouts."""

    def forget(rules):
        del rules["signals"]["layers/attn"]["tensors"]["{q,k,v,heads}"]

    found, whole = (planned("sequence", change, target) for change in (forget, unchanged))
    one = only(found, "unexplained", "layers/attn")
    assert place(one.source) == line_of(MODELS, "bkgts,bskh->btkgh")
    assert "goes over tensor: all-to-all" in one.text
    assert not [f for f in whole.findings if f.signal == "layers/attn"]
    assert sum(attention(found).sent.values()) > 1.3 * sum(attention(whole).sent.values())


def attention(found):
    """The plan's row for attention."""
    return next(row for row in found.signals if row.signal == "layers/attn")


# ---------------------------------------------------------------------------------------------- runs that ship


@pytest.fixture(
    scope="module",
    params=[
        ("quickstart", None),
        ("pipeline", None),
        pytest.param(("quickstart", GPUS), marks=needs_plugin),
        pytest.param(("pipeline", GPUS), marks=[needs_plugin, pytest.mark.slow]),
        pytest.param(("llama-8b", GPUS), marks=[needs_plugin, pytest.mark.slow]),
        pytest.param(("gpu", GPUS), marks=[needs_plugin, pytest.mark.slow]),
    ],
    ids=lambda case: "-".join(filter(None, case)),
)
def shipped(request):
    """The plan of the trainer's own step, for a shipped config."""
    name, target = request.param
    return make_plan(load(CONFIGS / f"{name}.yaml"), None if target is None else Target.parse(target))


def test_nothing_is_found_in_runs_that_ship(shipped):
    assert not shipped.warnings
    assert not shipped.rematerializations


def test_what_runs_that_ship_send_has_a_signal(shipped):
    assert_told(shipped)


# ---------------------------------------------------------------------------------------------- other functions


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_linen_model_sends_has_a_signal(target):
    mesh = jgt.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    model = Transformer()
    tokens = jax.ShapeDtypeStruct((8, SEQ), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    rules = jgt.make_rules(RULES)

    def loss(params, tokens):
        logits = model.apply(params, tokens)
        with context("loss"):
            return cross_entropy(logits, tokens)

    where = jgt.place(loss, rules, mesh, params, tokens)
    step = jax.jit(jax.value_and_grad(jgt.shard(loss, rules, mesh)), in_shardings=(where.params, where.inputs(tokens)))
    found = plan(step, params, tokens, target=target)
    assert_told(found)
    assert {"embed", "layers/attn", "layers/mlp", "head"} <= {row.signal for row in found.signals}


@pytest.mark.parametrize("target", TARGETS)
def test_a_function_without_signals_has_one_row(target):
    mesh = jgt.make_mesh({"data": 2, "tensor": 4})

    def fn(w, x):
        return jax.lax.with_sharding_constraint(jnp.sin(x) @ w, spec(mesh, "data", None))

    w = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=spec(mesh, "tensor", None))
    x = jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=spec(mesh, "data", "tensor"))
    found = plan(fn, w, x, target=target)
    (row,) = found.signals
    assert row.signal == "(none)"
    assert row.flops == row.flops_share == found.flops_per_device == 2 * 8 * 32 * 16 / 8
    assert sum(row.sent.values()) == found.sent_bytes == math.ceil(2 * 3 / 4 * (8 // 2 * 16 * 4))
    assert not found.findings


def assert_told(found):
    """At least 99 % of the sent bytes belong to a signal."""
    assert found.sent_bytes > 0
    assert sum(c.total_bytes for c in found.collectives if c.signal == "(none)") <= 0.01 * found.sent_bytes


# ----------------------------------------------------------------------------------------------------------------- loops


def test_a_loop_of_unknown_length_that_is_there_twice():
    def halved(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x / 2, x)

    def fn(x):
        with context("mlp"):
            for _ in range(2):
                x = jnp.sin(halved(x))
        return x

    one = only(plan(fn, array(16)), "unknown-loop", "mlp")
    assert place(one.source) == line_of(halved, "while_loop")
