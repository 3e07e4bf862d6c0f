"""The model of a run and its loss, as functions of arrays that rules lay out.

The model is the trainer's own, with the kernels that the run's devices have, or one of the user's own, by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jgt import Experts, Pipeline
from jgt.document import InputError

from ..config import Config
from ..data.config import DataConfig, OwnData
from ..data.own import function_of, open_own
from ..models.config import ModelConfig, OwnModel
from ..models.decoder import build
from ..models.experts.config import ExpertsConfig
from ..models.kernels import AttentionChoice, choose_attention
from ..models.linear import compute_type
from ..models.model import Model, Terms, of_flax, places_taken
from ..settings.code.files import Code
from ..settings.code.names import load_callable
from ..settings.training import DPO, PAIRED
from ..step.loss import token_places
from ..step.objective import ShardedLoss, check_results, mode_of, own_objective, reported
from ..step.preference import REFERENCE
from ..step.state import Tree
from ..step.trained import Trained, with_frozen
from ..weights.adapt.adapters import Adapters
from .layout import MeshLayout
from .losses import CALL, Where, fewest_chunks, losses_of, own_loss_of
from .remat import AUTO, Remat, remat_settings, with_remat_of

Element = Mapping[str, jax.ShapeDtypeStruct]
"""The arrays of one row of a batch, by name."""
_EXPERTS, _RANK = "layers/moe", 3
"""The signal of the decoders' experts, and the dims of what they read."""


@dataclass(frozen=True, kw_only=True)
class ModelProgram:
    """A run's model and loss, traced from shapes.

    attention, grouped: how attention and the matmuls of experts are computed, for the log; None and empty where the model has none. remat:
    `train.remat`, or the setting that `auto` begins with. trained: which parameters are trained. adapters: the model's, with `lora:`. loss,
    evaluated: the loss of the model's own parameters, in training and in an evaluation. is_token_loss: the loss is the trainer's own. init:
    makes parameters and variables from a key. shapes: the shapes of parameters, variables, and the rows of a batch that the loss gets at a
    time.
    """

    element: Element
    model: Model
    attention: AttentionChoice | None
    grouped: str
    remat: Remat
    trained: Trained
    adapters: Adapters | None
    loss_chunks: int
    loss: ShardedLoss
    evaluated: ShardedLoss
    is_token_loss: bool
    init: Callable[[jax.Array], tuple[Tree, Tree]]
    shapes: tuple[Tree, Tree, dict[str, jax.ShapeDtypeStruct]]


def program_of(
    config: Config, layout: MeshLayout, code: Code, where: Where, *, element: Element, remat: Remat, partial_rules: bool
) -> ModelProgram:
    """The model and the loss of a config. partial_rules: whether rules may match nothing. Raises InputError."""
    train = config.train
    # The loss runs on one part of the batch at a time, so the layout of its inputs is checked at the shape of a part. A pipeline gets the
    # whole batch, and runs the parts itself.
    pipeline = None if layout.pipeline is None else Pipeline.of(layout.pipeline.in_parts(train.accumulate))
    rows = rows_of(element, train.batch // (train.accumulate if pipeline is None else 1))
    chunks = train.loss_chunks or fewest_chunks(train, config.model, layout)
    own_loss = own_loss_of(config, chunks, code, where)
    attention, grouped = None, ""
    if isinstance(config.model, OwnModel):
        own_model = _with_keys_to_take(config.model, config.data, code, where)
        model = _own_model(own_model, code, where, rows, own_loss)
    else:
        attention = _attention(config.model, layout, where)
        model = build(config.model, attention.kernel)
        if config.model.experts is not None:
            model = _with_exchange_metrics(model, config.model.experts, config.model.seq, layout)
            grouped = _grouped_matmuls(config.model, layout.device)
    adapters, trained = None, Trained(config.optimizer.train)
    if config.lora is not None:
        call, further, dtype = partial(_call_on_zeros, rows, own_loss), config.optimizer.train, config.model.base_dtype
        adapters = Adapters.of(model, config.lora, call, where, train=further, base_dtype=dtype)
        model, layout = adapters.model, replace(layout, rules=adapters.rules(layout.rules, layout.batch))
        trained = adapters.trained
    model = with_frozen(model, trained, config.model.base_dtype, where)
    kernel = None if attention is None else attention.kernel
    if remat == AUTO:
        remat = remat_settings(keeps_scores=kernel is None or kernel.keeps_scores)[0]
    _check_places(config, model, where)
    recompute = partial(with_remat_of, remat=remat, attention=kernel, where=where("train.remat"))
    loss, evaluated = losses_of(config, layout, pipeline, model, own_loss, chunks, recompute, where, partial_rules)
    # Under jit, what is traced here is not traced again where the state is made.
    init = jax.jit(model.init)
    # Even the key is only a shape: nothing is computed where the devices may be absent.
    shapes = (*jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)), rows)
    if own_loss is not None:
        check_results(own_objective(model, own_loss, where("train.loss"), is_training=True), shapes, where("train.loss"))
    return ModelProgram(
        element=element,
        model=model,
        attention=attention,
        grouped=grouped,
        remat=remat,
        trained=trained,
        adapters=adapters,
        loss_chunks=chunks,
        loss=loss,
        evaluated=evaluated,
        is_token_loss=own_loss is None,
        init=init,
        shapes=shapes,
    )


def rows_of(element: Element, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch of rows, [rows, ...] each."""
    return {name: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for name, x in element.items()}


def element_of(config: Config, code: Code, where: Where) -> Element:
    """The arrays of one row of a batch. Data of the user's own is opened."""
    data, model = config.data, config.model
    if isinstance(data, OwnData):
        return open_own(data, code, where, seq=model.seq, vocab=model.vocab).element
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if data.has_segments:
        kinds["segments"] = jnp.int32
    if data.order == "zigzag":
        kinds["positions"] = jnp.int32
    shape = (2, model.seq) if data.source == "preferences" else (model.seq,)
    arrays = {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in kinds.items()}
    return {**arrays, **({REFERENCE: jax.ShapeDtypeStruct((2,), jnp.float32)} if config.train.loss == DPO else {})}


def _with_keys_to_take(model: OwnModel, data: DataConfig | OwnData, code: Code, where: Where) -> OwnModel:
    """The section with the values that it sets, and that the data does not read, among its arguments: a model must take these."""
    values = {"vocab": model.vocab, "seq": model.seq, "dtype": compute_type(model)}
    read = ["vocab", "seq"]
    if isinstance(data, OwnData):
        read = inspect.signature(function_of(data, code, where)).parameters
    # The config of a run directory has all keys. One that has its default asks for nothing.
    asked = {key: value for key, value in values.items() if getattr(model, key) != getattr(OwnModel, key) and key not in read}
    return replace(model, arguments={**model.arguments, **asked})


def _own_model(config: OwnModel, code: Code, where: Where, rows: Element, loss: Callable[..., object] | None) -> Model:
    """A model of the user's own. rows, loss: a linen module is called with them to find its parameters. Raises InputError."""
    own = load_callable("model.kind", config.kind, config.arguments, code, where)
    called = f"{where('model.kind')}: {CALL}" if loss is None else f"{where('train.loss')}: train.loss"
    try:
        with reported(called, rows):
            return of_flax(
                lambda rngs: own(vocab=config.vocab, seq=config.seq, dtype=compute_type(config), rngs=rngs),
                partial(_call_on_zeros, rows, loss),
            )
    except TypeError as error:
        raise InputError([f"{where('model.kind')}: model.kind: {config.kind}: {error}"]) from error


def _call_on_zeros(batch: Element, loss: Callable[..., object] | None, module: Any) -> object:
    """The loss of a batch of zeros in training, or the model's result without a loss of the user's own."""
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in batch.items()}
    if loss is not None:
        return loss(module, zeros, **mode_of(loss, True))
    # The trainer's loss multiplies the head in a derivative of its own, which an adapted matrix cannot pass.
    call = getattr(module, "features", module)
    return call(zeros["inputs"], **{name: x for name, x in token_places(zeros).items() if name in places_taken(module)})


def _attention(model: ModelConfig, layout: MeshLayout, where: Where) -> AttentionChoice:
    """The attention kernel. Raises InputError where the file asks for one that is not available."""
    choice = choose_attention(model, layout.device, sharing=layout.devices_of_stage)
    if model.attention not in ("auto", choice.kernel.name):
        why = f"{model.attention} is not available here: {choice.why}. Use auto, which takes it where it is available, or xla"
        raise InputError([f"{where('model.attention')}: model.attention: {why}"])
    return choice


def _grouped_matmuls(model: ModelConfig, device: Any) -> str:
    """The way in which the matmuls of experts run, as in the log."""
    if model.fp8:
        return "blocks of rows in eight bits"
    return Experts.matmuls(compute_type(model), device)


def _with_exchange_metrics(model: Model, experts: ExpertsConfig, seq: int, layout: MeshLayout) -> Model:
    """The model with metrics of the exchange of its experts: `exchange_rounds`, or `exchange_dropped` where rows may be dropped.

    The model itself where the counts of a row do not say which device they are on: in a pipeline, and where rules split the sequence.
    """
    exchange = Experts(layout.rules).exchange_at(_EXPERTS, _RANK, layout.mesh.shape) if layout.pipeline is None else None
    if exchange is None:
        return model

    def terms(decoder: Any) -> Terms:
        own, counts = model.terms(decoder), decoder.counts  # [L, b, E]
        if not exchange.can_count(*counts.shape[-2:]):
            return own
        rounds, dropped = exchange.served(counts, seq, experts.choose)
        name, value = ("exchange_dropped", jnp.mean(dropped)) if exchange.drops else ("exchange_rounds", jnp.max(rounds))
        # Terms without a factor are metrics alone.
        return {**own, name: (value.astype(jnp.float32), 0.0)}

    return replace(model, terms=terms, is_trained_differently=True)


def _check_places(config: Config, model: Model, where: Where) -> None:
    """Raises InputError if the model would not learn where documents begin, or which positions tokens have."""
    # A loss of the user's own has the batch, and calls the model as it likes.
    if isinstance(config.data, OwnData) or config.train.loss not in (None, *PAIRED):
        return
    masks = config.data.documents == "mask"
    wanted: list[tuple[str, str, str, str]] = []
    if config.data.has_segments and config.train.loss is None:
        wanted.append(("segments", "documents", "mask", "join") if masks else ("segments", "packing", "true", "false"))
    if config.data.order == "zigzag":
        wanted.append(("positions", "order", "zigzag", "plain"))
    problems: list[str] = []
    for argument, key, value, other in wanted:
        if argument not in model.takes:
            why = f"{value} needs a model that takes {argument} [b, s], and {config.model.kind} does not. Add the argument to it, or use"
            problems.append(f"{where(f'data.{key}')}: data.{key}: {why} {key}: {other}")
    if problems:
        raise InputError(problems)
