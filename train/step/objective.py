"""The function that a run minimises: a model and a loss as one function of arrays, which jgt then shards.

A loss sees a module and a batch: `loss(model, batch)`. The trainer's own is the cross entropy of the next token; one of the user's may
be anything. It returns one of

    loss                    a scalar, the mean over its batch
    (sum, weight)           two scalars; the run's loss is the sum of all sums divided by the sum of all weights
    (either, metrics)       with a dict of metrics, each of them in one of these two forms

Which form it is decides how parts of a batch are joined: the parts of an accumulated step, and the batches of an evaluation. A mean
counts by its rows, a sum by its weight, so both come out as they would over the whole batch at once.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jgt import Pipeline, Sharded
from jgt.document import InputError

from ..models.model import LostError, Model, Settle, Terms
from ..settings.code.names import FAILURES, call_problem, described, own_line
from .state import Tree
from .trained import merged

Arrays = dict[str, jax.Array]
"""A batch on the devices: arrays [b, ...] by name."""


RESERVED = (
    *("loss", "grad_norm", "applied", "step", "lr", "time", "samples", "tokens", "epoch", "mfu", "step_time_s", "samples_per_s"),
    *("tokens_per_s", "memory_bytes", "memory_peak_bytes", "memory_limit_bytes"),
)
"""Names that a step's row has anyway, which a metric cannot have."""


class Part(NamedTuple):
    """The results of a part of a batch beside its loss.

    weight: the weight of a loss that is a sum; None for a mean. metrics: a value and its weight for each name, in the same way. variables:
    the model's, afterwards.
    """

    weight: jax.Array | None
    metrics: dict[str, tuple[jax.Array, jax.Array | None]]
    variables: Tree


Loss = Callable[[Tree, Tree, Arrays], tuple[jax.Array, Part]]
"""loss(params, variables, batch) → the loss, a mean or a sum, and the rest."""
ShardedLoss = Sharded[[Tree, Tree, Arrays], tuple[jax.Array, Part]]
"""The same under rules."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss that a run minimises, and the one that it evaluates, of a model that is not being trained.

    is_token_loss: the loss is the trainer's own, a sum of nats over the batch's `weights`. used(params): the parameters that both take,
    from a state's. settle: see `Model`. is_of_whole_batches: an evaluation on a smaller batch has other results, because rows meet.
    """

    loss: Loss
    evaluated: Loss
    is_token_loss: bool
    used: Callable[[Tree], Tree] = lambda params: params
    settle: Settle = lambda variables: (variables, {})
    is_of_whole_batches: bool = False

    def beside(self, frozen: Tree) -> Objective:
        """The objective as a function of the trained parameters alone. frozen: the others, as a state has them."""
        used = self.used(frozen)

        def loss(params: Tree, variables: Tree, batch: Arrays) -> tuple[jax.Array, Part]:
            return self.loss(merged(params, used), variables, batch)

        return replace(self, loss=loss)


TokenLoss = Callable[[Any, Arrays], jax.Array]
"""loss(module, batch) → Σ weights · nats."""


def token_objective(model: Model, loss: TokenLoss, where: str, *, is_training: bool, second: tuple[TokenLoss, float] | None = None) -> Loss:
    """The function of arrays of the trainer's own loss: Σ weights · nats, while it is trained with the model's terms.

    where: the place and name of the model's key. second: the loss of the second next token of a module that was called, and its factor.
    """

    def total(params: Tree, variables: Tree, batch: Arrays) -> tuple[jax.Array, Part]:
        def use(module: Any) -> tuple[jax.Array, Terms, jax.Array | None]:
            value = loss(module, batch)
            if not is_training:
                return value, {}, None
            return value, model.terms(module), None if second is None else second[0](module, _of_second(batch))

        with reported(where):
            (value, terms, more), variables = model.run(use, params, variables, is_training)
        # The weights of all parts of a batch sum to 1, so a part's terms count by its share.
        share = jnp.sum(batch["weights"])
        metrics: dict[str, tuple[jax.Array, jax.Array | None]] = {name: (share * term, share) for name, (term, _) in terms.items()}
        if terms:
            value += share * sum(factor * term for term, factor in terms.values())
        if more is not None and second is not None:
            value += second[1] * more
            metrics["mtp_loss"] = more, share
        return value, Part(None, metrics, variables)

    return total


def _of_second(batch: Arrays) -> Arrays:
    """The batch with the second next tokens of the same documents as targets, of which the last token has none."""
    after = {name: jnp.pad(batch[name][:, 1:], [(0, 0), (0, 1)]) for name in ("targets", "weights", "segments") if name in batch}
    is_same = after["segments"] == batch["segments"] if "segments" in batch else True
    return {**batch, "targets": after["targets"], "weights": jnp.where(is_same, after["weights"], 0)}


def own_objective(model: Model, loss: Callable[..., object], where: str, *, is_training: bool) -> Loss:
    """The function of arrays of a loss of the user's own. where: the place of its key. Tracing it raises InputError for another result.

    A loss that has the argument `train` learns by it whether the model is being trained. While it is, the model's terms are added.
    """
    mode = mode_of(loss, is_training)

    def total(params: Tree, variables: Tree, batch: Arrays) -> tuple[jax.Array, Part]:
        def use(module: Any) -> tuple[Any, Terms]:
            result = loss(module, batch, **mode)
            return result, model.terms(module) if is_training else {}

        with reported(f"{where}: train.loss", batch):
            (result, terms), variables = model.run(use, params, variables, is_training)
        value, metrics = result if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping) else (result, {})
        total, weight = _value_and_weight(value, f"{where}: train.loss", jnp.floating)
        if taken := [name for name in metrics if name in RESERVED]:
            raise InputError(
                [f"{where}: train.loss: a metric cannot be called {taken[0]!r}. Other names are free, except {', '.join(RESERVED)}"]
            )
        named = {str(name): _value_and_weight(x, f"{where}: train.loss: metric {name}") for name, x in metrics.items()}
        if terms:
            total += (1.0 if weight is None else weight) * sum(factor * term for term, factor in terms.values())
            named = {name: (term, None) for name, (term, _) in terms.items()} | named
        return total, Part(weight, named, variables)

    return total


def mode_of(loss: Callable[..., object], is_training: bool) -> dict[str, bool]:
    """The argument `train` for a loss of the user's own; empty if it does not have it."""
    return {"train": is_training} if "train" in inspect.signature(loss).parameters else {}


def checked_loss(loss: Callable[..., object], where: str) -> Callable[..., object]:
    """A loss of the user's own. where: the place of its key. Raises InputError if it has not the arguments of a loss."""
    if problem := call_problem(loss, "model", "batch", **mode_of(loss, True)):
        raise InputError([f"{where}: train.loss: {problem}. Write loss(model, batch), or loss(model, batch, train)"])
    return loss


def check_results(loss: Loss, shapes: tuple[Tree, Tree, Mapping[str, jax.ShapeDtypeStruct]], where: str) -> None:
    """Raises InputError for a loss of the user's own that does not depend on the model, or whose weight does. where: the place of its key.

    Whoever returns a loss and an accuracy means a metric, and would train with their quotient.
    """
    program, (_, part) = jax.make_jaxpr(loss, return_shape=True)(*shapes)
    num_params, num_results = len(jax.tree.leaves(shapes[0])), len(program.out_avals)

    def uses_params(result: int) -> bool:
        return any(partial_eval.dce_jaxpr(program.jaxpr, [n == result for n in range(num_results)])[1][:num_params])

    if not uses_params(0):
        raise InputError([f"{where}: train.loss: does not depend on the model's parameters, so there is nothing to train"])
    if part.weight is not None and uses_params(1):
        why = "returned two numbers, which are a sum and its weight, but the second one depends on the model's parameters"
        remedy = "For a metric return (loss, {'accuracy': value}), and for a mean with such weights sum / weight"
        raise InputError([f"{where}: train.loss: {why}. {remedy}"])


@contextlib.contextmanager
def reported(where: str, names: Collection[str] = ()) -> Iterator[None]:
    """Inside, an error that the user's own code raises becomes an InputError with its line. names: the names of the arrays of a batch."""
    try:
        yield
    except InputError:
        raise
    except LostError as error:
        raise InputError([f"{where}: {error}"]) from None
    except FAILURES as error:
        if not own_line(error):
            raise
        is_name = isinstance(error, KeyError) and names and error.args[0] not in names
        more = f". The arrays of a batch are {', '.join(names)}" if is_name else ""
        raise InputError([f"{where} failed: {described(error)}{more}"]) from error


def problem_of_parts(loss: ShardedLoss, shapes: tuple[Tree, Tree, Mapping[str, jax.ShapeDtypeStruct]]) -> str:
    """Why a loss of the user's own cannot be joined from the losses of parts of its batch; empty if it can. Its metrics count, too."""
    value, part = Pipeline.results_of_parts(loss, *shapes)
    pairs = {"the loss": (value, part.weight)} | {f"the metric {name}": pair for name, pair in part.metrics.items()}
    for what, (value, weight) in pairs.items():
        for one in (value, *([] if weight is None else [weight])):
            if one.problem:
                return f"{what} of a batch cannot be made of those of its parts: {one.problem}"
            if weight is None and one.degree:
                return f"{what} is a sum over rows, where a scalar counts as a mean"
        if weight is not None and value.degree != weight.degree and not value.zero:
            return f"{what} is a pair of which one number grows with the rows and the other does not"
    return ""


def mean_of_parts(value: jax.Array, weight: jax.Array | None, parts: int) -> jax.Array:
    """The mean over a whole batch, from values and weights that were added up over its equal parts."""
    return value / parts if weight is None else value / jnp.where(weight == 0, 1, weight)


def with_weight(value: jax.Array, weight: jax.Array | None, rows: int) -> tuple[jax.Array, jax.Array]:
    """A value as a sum with a weight, by which batches of an evaluation can be added."""
    return (value * rows, jnp.float32(rows)) if weight is None else (value, weight)


def _value_and_weight(value: Any, where: str, kind: jax.typing.DTypeLike = jnp.number) -> tuple[jax.Array, jax.Array | None]:
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    numbers = [jnp.asarray(x) for x in (value if is_pair else [value]) if hasattr(x, "dtype") or isinstance(x, int | float)]
    if len(numbers) != 1 + is_pair or any(x.shape or not jnp.issubdtype(x.dtype, jnp.number) for x in numbers):
        shown = ", ".join(f"{x.dtype}{list(x.shape)}" for x in numbers) or type(value).__name__
        raise InputError([f"{where}: returned {shown}. Return a scalar, the mean over the batch, or a pair of scalars (sum, weight)"])
    value, weight = numbers if is_pair else (*numbers, None)
    if not jnp.issubdtype(value.dtype, kind):
        raise InputError([f"{where}: returned {value.dtype}[], and whole numbers have no gradient. Return a float"])
    # The weight says how much a part counts, and is not to be learned.
    return value.astype(jnp.float32), None if weight is None else jax.lax.stop_gradient(weight.astype(jnp.float32))
