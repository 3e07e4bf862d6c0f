"""Values of schedules, AdamW compared with the paper's formulas, Muon with optax's, and bf16 moments with f32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from steps import roles_of

from jgt.document import InputError
from train.models.config import GPTConfig, ModelConfig
from train.models.decoder import build, stacked
from train.models.model import Table, Vector, of_nnx
from train.settings.code.files import Code
from train.setup import prepare
from train.step.config import OptimizerConfig, OwnOptimizer
from train.step.muon import orthogonalize
from train.step.optimizer import Settings, build_optimizer, learning_rate, own_optimizer

TOKENS = jax.ShapeDtypeStruct((2, 4), jnp.int32)


def rates(num_steps, **keys):
    config = OptimizerConfig(**{"lr": 1.0, **keys})
    return [learning_rate(config, num_steps, step + 1) for step in range(num_steps + 1)]


def built(config, roles):
    """The optimizer at its highest learning rate."""
    return build_optimizer(config, roles)(Settings(lr=config.lr, weight_decay=config.weight_decay, clip=0.0))


def test_warmup_starts_above_zero_and_ends_at_lr():
    assert rates(6, schedule="constant", warmup=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1])


def test_constant():
    assert rates(3, schedule="constant") == pytest.approx([1, 1, 1, 1])


def test_cosine_falls_to_final_lr_at_the_last_step():
    half = 0.2 + 0.8 * 0.5
    assert rates(6, schedule="cosine", warmup=2, final_lr=0.2)[2:] == pytest.approx(
        [1, 0.2 + 0.8 * (1 + np.sqrt(0.5)) / 2, half, 0.2 + 0.8 * (1 - np.sqrt(0.5)) / 2, 0.2]
    )


def test_wsd_stays_and_falls_linearly():
    assert rates(10, schedule="wsd", warmup=1, decay=0.4, final_lr=0.0) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_warmup_may_be_longer_than_the_run(schedule, num_steps):
    assert rates(num_steps, schedule=schedule, warmup=9)[:num_steps] == pytest.approx([0.1, 0.2][:num_steps])


def test_adamw():
    config = OptimizerConfig(lr=0.1, schedule="constant", b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3)
    optimizer = built(config, {"kernel": "matrix", "bias": "vector"})
    params = {"kernel": np.array([1.0, -2.0]), "bias": np.array([0.5])}
    gradients = [{"kernel": np.array([3.0, 4.0]), "bias": np.array([12.0])}, {"kernel": np.array([0.1, 0.2]), "bias": np.array([0.3])}]
    ours = jax.tree.map(jnp.float32, params)
    state = optimizer.init(ours)
    m, v = ({k: np.zeros_like(x) for k, x in params.items()} for _ in range(2))
    for t, gradient in enumerate(gradients, 1):
        updates, state = optimizer.update(jax.tree.map(jnp.float32, gradient), state, ours)
        ours = jax.tree.map(jnp.add, ours, updates)
        for k, g in gradient.items():
            m[k], v[k] = 0.8 * m[k] + 0.2 * g, 0.9 * v[k] + 0.1 * g**2
            update = (m[k] / (1 - 0.8**t)) / (np.sqrt(v[k] / (1 - 0.9**t)) + 1e-6)
            params[k] = params[k] - 0.1 * (update + (0.3 * params[k] if k == "kernel" else 0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), ours, params)


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_matrices_decay_and_nothing_else(kind):
    model = build({"llama": ModelConfig, "gpt": GPTConfig}[kind](layers=1, embed=8, heads=2, vocab=9, seq=4))
    params, _ = jax.jit(model.init)(jax.random.key(0))
    optimizer = built(OptimizerConfig(lr=1.0, schedule="constant", weight_decay=1.0), roles_of(model, TOKENS))
    # With gradients of zero, an update is the decay alone. Ones, so that nothing that decays is zero already.
    ones, zeros = jax.tree.map(jnp.ones_like, params), jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(ones), ones)
    found = {(str(path[-1].key), bool(x.any())) for path, x in jax.tree.leaves_with_path(updates)}
    decaying = {"kernel", "embedding"} | ({"unembedding"} if kind == "llama" else set())
    spared = {"scale"} | ({"bias", "positions"} if kind == "gpt" else set())
    assert found == {(name, True) for name in decaying} | {(name, False) for name in spared}


class Odd(nnx.Module):
    """Parameters whose names do not show their roles."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones((4, 3)))
        self.experts = nnx.Param(jnp.ones((2, 4, 3)))
        self.gain = nnx.Param(jnp.ones((4,)))
        self.temperature = nnx.Param(jnp.ones(()))
        self.kernel = Vector(jnp.ones((4, 3)))
        self.words = Table(jnp.ones((4, 3)))

    def __call__(self, x):
        return x + sum(p[...].sum() for p in (self.weight, self.experts, self.gain, self.temperature, self.kernel, self.words))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.layers = stacked(Odd, 5, rngs)

    def __call__(self, x):
        graph, layers = nnx.split(self.layers)
        return jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, layers)[0]


@pytest.mark.parametrize("make", [Odd, Stacked])
def test_roles_are_those_of_types_and_ranks_whatever_the_names(make):
    found = roles_of(of_nnx(make), jax.ShapeDtypeStruct((), jnp.float32))
    assert found.get("layers", found) == {
        "weight": "matrix",
        "experts": "matrix",
        "gain": "vector",
        "temperature": "vector",
        "kernel": "vector",
        "words": "table",
    }


def test_a_late_warmup_leaves_less_to_fall_through():
    config = OptimizerConfig(lr=1.0, schedule="wsd", warmup=8, decay=0.5, final_lr=0.1)
    assert learning_rate(config, 10, 11) == pytest.approx(0.1)


def tree(seed, dtype=jnp.float32):
    """Random parameters or gradients: two stacks of matrices, wide and tall, a vector and a table."""
    shapes = {"mlp": {"up": {"kernel": (3, 4, 6)}, "down": {"kernel": (3, 6, 4)}}, "norm": {"scale": (4,)}, "embed": {"embedding": (5, 4)}}
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    return jax.tree.map(lambda shape: jax.random.normal(next(keys), shape, dtype), shapes, is_leaf=lambda x: isinstance(x, tuple))


ROLES = {
    "mlp": {"up": {"kernel": "matrix"}, "down": {"kernel": "matrix"}},
    "norm": {"scale": "vector"},
    "embed": {"embedding": "table"},
}


def test_muon_is_that_of_optax_for_matrices_and_adamw_for_the_rest():
    keys = {"lr": 0.1, "schedule": "constant", "weight_decay": 0.3}
    ours, adamw = (built(OptimizerConfig(name=name, **keys), ROLES) for name in ("muon", "adamw"))
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    theirs = optax.contrib.muon(
        0.1, weight_decay=0.3, consistent_rms=0.2, muon_weight_dimension_numbers=lambda p: jax.tree.map(lambda _: numbers, p)
    )
    params = tree(0)

    @jax.jit
    def second(params, gradients):
        """The second update of each optimizer, after a first one with half the gradients."""
        found = []
        for optimizer, part in ((ours, lambda x: x), (adamw, lambda x: x), (theirs, lambda x: x["mlp"])):
            _, state = optimizer.update(jax.tree.map(lambda g: 0.5 * g, part(gradients)), optimizer.init(part(params)), part(params))
            found.append(optimizer.update(part(gradients), state, part(params))[0])
        return found

    updates, by_adamw, by_muon = second(params, tree(1))
    # The same formulas, multiplied in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), updates, by_adamw | {"mlp": by_muon})


@pytest.mark.parametrize(("shape", "dtype"), [((2, 16, 48), jnp.float32), ((2, 48, 16), jnp.float32), ((24, 16), jnp.bfloat16)])
def test_singular_values_come_near_one(shape, dtype):
    # Those of a random matrix are within a factor of 10; five steps bring such to 0.7 ... 1.2, and bf16 is off by a few per cent.
    x = np.random.default_rng(0).normal(size=shape)
    values = np.linalg.svd(np.asarray(jax.jit(orthogonalize)(x.astype(dtype)), np.float64), compute_uv=False)
    assert 0.6 < values.min() <= values.max() < 1.3


def test_a_matrix_of_zeros_stays_zero():
    assert not orthogonalize(jnp.zeros((2, 3, 4))).any()


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_muon_takes_the_matrices_of_the_layers(kind):
    model = build({"llama": ModelConfig, "gpt": GPTConfig}[kind](layers=1, embed=8, heads=2, vocab=9, seq=4))
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    state = jax.eval_shape(built(OptimizerConfig(name="muon"), roles_of(model, TOKENS)).init, shapes)
    assert state.inner_states.keys() == {"muon", "adamw"}
    moments = jax.tree.leaves_with_path(state.inner_states["muon"].inner_state[0].mu)
    assert all(path[0].key == "layers" and path[-1].key == "kernel" for path, _ in moments)
    assert len(moments) == (7 if kind == "llama" else 6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_in_bf16_lead_where_those_in_f32_lead(name):
    params = {kind: {"kernel": tree(0)["mlp"][kind]["kernel"]} for kind in ("up", "down")}
    target, matrices = jax.tree.map(lambda x: x + 1, params), jax.tree.map(lambda _: "matrix", params)

    def distance(params):
        return sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True))

    def train(moments):
        config = OptimizerConfig(name=name, lr=0.05, warmup=10, weight_decay=0.0, moments=moments)
        make = build_optimizer(config, matrices)
        rates = jnp.float32([learning_rate(config, 300, step + 1) for step in range(300)])

        def step(carry, inputs):
            (params, state), (key, rate) = carry, inputs
            optimizer = make(Settings(lr=rate, weight_decay=0.0, clip=0.0))
            # Noise, so that moments move up and down in every step.
            gradients = jax.tree.map(lambda g: g + 0.5 * jax.random.normal(key, g.shape), jax.grad(distance)(params))
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), distance(params)

        (_, state), distances = jax.lax.scan(
            step, (params, built(config, matrices).init(params)), (jax.random.split(jax.random.key(1), 300), rates)
        )
        return distances, state

    (exact, _), (rounded, state) = jax.jit(lambda: (train("f32"), train("bf16")))()
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"bfloat16", "int32"}
    assert exact[-1] < exact[0] / 4
    # Each update is off by at most the 0.4 % of a moment that rounding takes; the noise does not leave it in one direction.
    np.testing.assert_allclose(rounded, exact, rtol=0.05, atol=0.01 * float(exact[0]))


def test_slow_moments_are_not_kept_in_bf16():
    problems = dict(OptimizerConfig(b2=0.999, momentum=1.0, moments="bf16").problems())
    lost = "0.999 changes a moment by 0.001 of itself in a step, but rounding to bf16 takes away up to 0.004"
    assert problems == {"b2": f"{lost}. Use at most 0.99, or optimizer.moments=f32"}
    assert [key for key, _ in OptimizerConfig(name="muon", b2=0.99, momentum=0.995, moments="bf16").problems()] == ["momentum"]
    assert not list(OptimizerConfig(b2=0.999).problems())


def test_a_weight_decay_that_an_own_optimizer_does_not_take_is_refused():
    def made(function, **keys):
        return own_optimizer(OwnOptimizer(name="python:own", **keys), Code(objects={"optimizer.name": function}), "run.yaml:2".format)

    def plain(learning_rate):
        return optax.sgd(learning_rate)

    with pytest.raises(InputError) as caught:
        made(plain, weight_decay=0.3)
    (problem,) = caught.value.problems
    assert problem == "run.yaml:2: optimizer.weight_decay: plain has no argument 'weight_decay'. It takes: learning_rate"
    made(plain, weight_decay=OwnOptimizer.weight_decay)
    # A function that takes the decay gets the value of the step.
    decayed = made(
        lambda learning_rate, weight_decay: optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(1.0)), weight_decay=0.3
    )
    one = jnp.ones(())
    updates, _ = decayed(Settings(lr=1.0, weight_decay=0.5, clip=0.0)).update(0 * one, decayed(Settings(1.0, 0.5, 0.0)).init(one), one)
    assert float(updates) == -0.5


def test_another_learning_rate_or_number_of_steps_is_the_same_program(tiny):
    numbers = [
        (),
        ("optimizer.lr=0.5", "train.steps=7"),
        ("optimizer.weight_decay=0.3", "optimizer.clip=2.0", "optimizer.schedule=wsd", "optimizer.warmup=3"),
    ]
    setups = [prepare(tiny(*overrides)) for overrides in numbers]
    assert len({setup.train_step().lower(*setup.step_shapes).as_text() for setup in setups}) == 1
    assert len({tuple(setup.settings(5).tolist()) for setup in setups}) == 3
