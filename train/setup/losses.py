"""The losses of a run: the one that `train.loss` names, and the functions of arrays under the rules that are made of it and the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jgt
from jgt import Pipeline

from ..config import Config
from ..models.config import ModelConfig, OwnModel
from ..models.model import Model
from ..settings.code.files import Code
from ..settings.code.names import load_object
from ..settings.training import DPO, PAIRED, TrainConfig
from ..step.config import OptimizerConfig, OwnOptimizer
from ..step.loss import loss_of_logits, make_loss, num_chunks
from ..step.objective import Loss, ShardedLoss, checked_loss, mode_of, own_objective, token_objective
from ..step.preference import dpo_loss, orpo_loss
from .layout import MeshLayout

Where = Callable[[str], str]
"""The file and line of a key of the run."""
CALL = "model.kind: a call with tokens [b, s]"
"""The beginning of messages about a language model of the user's own."""


def own_loss_of(config: Config, chunks: int, code: Code, where: Where) -> Callable[..., object] | None:
    """The loss that `train.loss` names; None for the cross entropy of the next token."""
    name, place = config.train.loss, where("train.loss")
    if name in PAIRED:
        softcap = None if isinstance(config.model, OwnModel) else config.model.logits_softcap
        return partial(dpo_loss if name == DPO else orpo_loss, beta=config.train.beta, chunks=chunks, softcap=softcap)
    return None if name is None else checked_loss(load_object(name, "train.loss", code, place), place)


def losses_of(
    config: Config,
    layout: MeshLayout,
    pipeline: Pipeline | None,
    model: Model,
    own: Callable[..., object] | None,
    chunks: int,
    recompute: Callable[[Loss], Loss],
    where: Where,
    partial_rules: bool,
) -> tuple[ShardedLoss, ShardedLoss]:
    """The loss under the rules, in training and in an evaluation, which share one trace where that makes no difference.

    pipeline: the step's. An evaluation has the run's own, since its batches have no parts. recompute: lets layers keep what `train.remat`
    says.
    """
    whole = Pipeline.of(layout.pipeline)
    # Whether the model's own derivatives leave gradients in f32 for devices to add up. A pipeline widens them anyway.
    widens = config.optimizer.gradients == "f32" and layout.pipeline is None
    pads = config.train.uneven == "pad" and may_reshape(config.optimizer)
    tokens, second, rate = loss_of_logits, None, None if isinstance(config.model, OwnModel) else config.model.mtp_rate
    if model.has_features:
        make = partial(
            make_loss,
            chunks=chunks,
            groups=layout.groups,
            parts=1 if layout.pipeline is not None else layout.sequence_shards,
            wide_gradients=widens,
            softcap=config.model.logits_softcap,
        )
        tokens = make(lambda module, x, **more: module.features(x, **more))
        if rate is not None:
            second = make(lambda module, x, **more: module.second), rate

    def sharded(is_training: bool) -> ShardedLoss:
        if own is None:
            plain = token_objective(model, tokens, f"{where('model.kind')}: {CALL}", is_training=is_training, second=second)
        else:
            plain = own_objective(model, own, where("train.loss"), is_training=is_training)
        return jgt.shard(
            recompute(plain),
            layout.rules,
            layout.mesh,
            pipeline=pipeline if is_training else whole,
            partial=partial_rules,
            state="variables",
            pad=pads,
            wide_gradients=widens,
            # A pipeline has its own way to the gradients of weights.
            reverse_mode=layout.pipeline is None,
        )

    loss = sharded(True)
    reads_train = own is not None and mode_of(own, True)
    is_same = pipeline == whole and second is None and not model.is_trained_differently and not reads_train
    return loss, loss if is_same else sharded(False)


def fewest_chunks(train: TrainConfig, model: ModelConfig | OwnModel, layout: MeshLayout) -> int:
    """The fewest chunks of the loss that fit."""
    pipeline = layout.pipeline
    # The logits of these rows exist at once: the rows of one part of the batch, in a pipeline of one microbatch.
    rows = train.batch // train.accumulate // (1 if pipeline is None else pipeline.microbatches)
    rows *= 2 if train.loss in PAIRED else 1
    return num_chunks(rows, model.seq, model.vocab, layout.mesh.size, local_seq=max(model.seq // layout.sequence_shards, 1))


def may_reshape(optimizer: OptimizerConfig | OwnOptimizer) -> bool:
    """Whether parameters may be stored in other shapes than the model's."""
    # An optimizer of the user's own sees the model's shapes, which may tell it something. The host's memory has no all-to-all.
    return not isinstance(optimizer, OwnOptimizer) and optimizer.offload != "host"
