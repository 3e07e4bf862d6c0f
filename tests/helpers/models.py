"""The parts of a small decoder, from which tests build losses, and the comparison with the unpipelined loss on one device.

b batch, s seq, d embed, f ffn, v vocab, l layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jgt
from jgt.signal import context, tensor

ROWS, SEQ, EMBED, FFN, VOCAB, LAYERS = 16, 4, 8, 16, 16, 4

RULES = {
    "axes": {"batch": ["data", "fsdp"]},
    "signals": {
        "embed": {"params": {"embed": [["stage", "tensor", "fsdp"], None]}},
        "layers/mlp": {
            "params": {"up": ["fsdp", "tensor"], "down": ["tensor", "fsdp"]},
            "tensors": {"hidden": ["batch", None, "tensor"]},
        },
        "head": {"params": {"unembed": [["stage", "tensor"], "fsdp"]}, "tensors": {"logits": ["batch", None, ["stage", "tensor"]]}},
    },
    "default": "replicate",
}


def make_params(num_layers=LAYERS, **more):
    """The parameters of the decoder. more: shapes of further parameters, by name."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)

    return {
        "embed": normal(VOCAB, EMBED),
        "layers": {"up": normal(num_layers, EMBED, FFN), "down": normal(num_layers, FFN, EMBED)},
        "unembed": normal(VOCAB, EMBED),
        **{name: normal(*shape) for name, shape in more.items()},
    }


def make_batch(num_rows=ROWS):
    """tokens, targets, weights [b, s]; the first rows are padding, the others have different lengths."""
    rng = np.random.default_rng(1)
    length = rng.integers(1, SEQ + 1, num_rows)
    length[: num_rows // 4] = 0
    return {
        "tokens": rng.integers(0, VOCAB, (num_rows, SEQ), np.int32),
        "targets": rng.integers(0, VOCAB, (num_rows, SEQ), np.int32),
        "weights": (np.arange(SEQ) < length[:, None]).astype(np.float32),
    }


def embed(params, batch):
    """[b, s, d]."""
    with context("embed"):
        return params["embed"][batch["tokens"]]


def mlp(x, weights):
    """[b, s, d] → [b, s, d]."""
    with context("mlp"):
        return x + tensor(jnp.tanh(x @ weights["up"]), "hidden") @ weights["down"]


def run_layers(params, x, layer=mlp):
    """Applies layer(x, weights) with the weights of each layer."""
    with context("layers"):
        return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])[0]


def logits_of(params, x, table="unembed"):
    """[b, s, d] → [b, s, v]."""
    with context("head"):
        return tensor(jnp.einsum("bsd,vd->bsv", x, params[table]), "logits")


def nats(logits, batch):
    """The loss of each target [b, s]."""
    with context("loss"):
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - picked


def weighted(nats, batch):
    """The mean over tokens that are not padding."""
    return jnp.sum(nats * batch["weights"]) / jnp.sum(batch["weights"])


def loss_of(params, x, batch, table="unembed"):
    """The loss of the layers' output [b, s, d]."""
    return weighted(nats(logits_of(params, x, table), batch), batch)


def decoded(params, batch):
    """The logits of the whole decoder [b, s, v]."""
    return logits_of(params, run_layers(params, embed(params, batch)))


def decoder_loss(params, batch):
    """The loss of the whole decoder."""
    return weighted(nats(decoded(params, batch), batch), batch)


def compiled(fn):
    """`fn` under jit, without LLVM's optimizations: they take a third of the compilation time and change nothing here."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def mesh_of(**sizes):
    """A mesh of data, fsdp, stage and tensor over the first devices; sizes are 1 unless given."""
    sizes = dict.fromkeys(("data", "fsdp", "stage", "tensor"), 1) | sizes
    return jgt.make_mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())])


def pipeline_of(**options):
    """The pipeline of the layers, by default with 4 microbatches."""
    return jgt.Pipeline(**{"signal": "layers", "microbatches": 4} | options)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A loss with arguments. Its results on one device, without a pipeline, are computed once."""

    loss: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]
    rules: Any
    has_aux: bool = False

    @cached_property
    def expected(self):
        """The results, and the gradients with respect to the parameters."""
        found = self.derivatives(self.loss)
        for path, gradient in jax.tree.leaves_with_path(found[1]):
            assert np.abs(gradient).max() > 1e-4, f"the loss does not depend on {jax.tree_util.keystr(path)}"
        return found

    def derivatives(self, loss):
        """The same for another loss."""
        return jax.device_get(compiled(jax.value_and_grad(loss, has_aux=self.has_aux))(self.params, *self.inputs))

    def pipelined(self, mesh, **options):
        """The pipelined loss over a mesh."""
        return jgt.shard(self.loss, self.rules, mesh, pipeline=pipeline_of(**options))


def case(loss=decoder_loss, params=None, *inputs, rules=RULES, has_aux=False):
    """A case, by default with the parameters and the batch of the decoder."""
    return Case(
        loss=loss,
        params=make_params() if params is None else params,
        inputs=inputs or (make_batch(),),
        rules=jgt.make_rules(rules),
        has_aux=has_aux,
    )


def assert_close(got, want, tolerance):
    """The error of every leaf is at most `tolerance` times the largest entry of the expected leaf. Integers are equal.

    A leaf that is zero except for rounding (the gradient of a key's bias) must stay as small.
    """
    largest = max((float(np.abs(x).max()) for x in jax.tree.leaves(want)), default=0.0)

    def check(path, got, want):
        got, want = np.asarray(got), np.asarray(want)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if not np.issubdtype(want.dtype, np.integer):
            got, want = got.astype(np.float64), want.astype(np.float64)
            if np.abs(want).max() < 1e-7 * largest:
                assert np.abs(got).max() < 1e-6 * largest, f"{jax.tree_util.keystr(path)}: should be zero"
                return
            error = np.abs(got - want).max() / max(np.abs(want).max(), np.finfo(np.float32).tiny)
            assert error <= tolerance, f"{jax.tree_util.keystr(path)}: off by {error:.1e} of its largest entry"
        else:
            np.testing.assert_array_equal(got, want)

    jax.tree.map_with_path(check, got, want)


def assert_values(got, want):
    """Results agree to 1e-6, relative to the largest entry if that is above 1."""

    def check(got, want):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(1.0, float(np.abs(want).max())))

    jax.tree.map(check, got, want)


def assert_trained(case, mesh, **options):
    """Through a pipeline, a case has the same results and gradients as on one device."""
    values, gradients = case.derivatives(case.pipelined(mesh, **options))
    assert_values(values, case.expected[0])
    assert_close(gradients, case.expected[1], 1e-5)


def assert_exact(case, mesh, **options):
    """Trained, or evaluated forward only, a case has the same results through a pipeline as on one device."""
    assert_trained(case, mesh, **options)
    assert_values(compiled(case.pipelined(mesh, **options))(case.params, *case.inputs), case.expected[0])
