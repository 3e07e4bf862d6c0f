"""The optimizer of a config, built from optax: AdamW for all parameters, or Muon for matrices and AdamW for the rest.

Which parameters decay and which are Muon's follows from their roles (`train/models/decoder.py`), never from their names. A moment may be
kept in bf16 between updates; the update itself is computed in f32. Learning rate and weight decay are arguments of the compiled step
and not constants in it, so an optimizer is a function of them, which the step calls while it is traced. A sweep over learning rates, or
a run that is continued for more steps, thus runs the program that is compiled already. The host computes them, one short vector for each
step; it knows the number of each step, so the learning rate does not depend on an optimizer's own count.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgt import Storage
from jgt.document import InputError

from ..models.model import Model, Role
from ..settings.code.files import Code
from ..settings.code.names import load_callable, load_object
from .config import OptimizerConfig, OwnOptimizer
from .muon import MapMatrices, scale_by_muon
from .state import Tree


class Settings(NamedTuple):
    """The numbers of one step; on the devices, scalars f32[]. clip is 0 if gradients are not clipped."""

    lr: Any
    weight_decay: Any
    clip: Any


MakeOptimizer = Callable[[Settings], optax.GradientTransformation]
"""From the settings of a step, whose numbers may be traced, to the optimizer. Its state does not depend on them."""


def build_optimizer(
    config: OptimizerConfig,
    roles: object,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    map_matrices: MapMatrices = jax.tree.map,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> MakeOptimizer:
    """The optimizer of a config.

    roles: the Role of each parameter, in a tree like theirs. dtype: of Muon's matmuls. map_matrices(fn, tree): maps a function over the
    matrices of a tree, wherever their shards are. sizes: see `scale_by_muon`. Clipping is not part of it: the step clips, since it has the
    norm already.
    """
    decays = by_role(roles, {"matrix": True, "table": True}, default=False)

    def make(settings: Settings) -> optax.GradientTransformation:
        optimizer = optax.adamw(settings.lr, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=settings.weight_decay, mask=decays)
        if config.name == "muon":
            # Each of the two keeps a state for its own parameters only.
            muon = optax.chain(
                scale_by_muon(config.momentum, dtype, map_matrices, sizes),
                optax.add_decayed_weights(settings.weight_decay),
                optax.scale_by_learning_rate(settings.lr),
            )
            optimizer = optax.partition({"muon": muon, "adamw": optimizer}, by_role(roles, {"matrix": "muon"}, default="adamw"))
        return optimizer if config.moments == "f32" else with_moments_in(optimizer, jnp.bfloat16)

    return make


def own_optimizer(config: OwnOptimizer, code: Code, where: Callable[[str], str]) -> MakeOptimizer:
    """An optimizer of the user's own, which must take a weight decay that the config sets.

    where(key): file and line of a key of the config. Raises InputError, also when it is called.
    """
    taken = inspect.signature(load_object(config.name, "optimizer.name", code, where("optimizer.name"))).parameters
    # The config of a run directory has all keys. One that has its default asks for nothing.
    is_asked = config.weight_decay != OwnOptimizer.weight_decay and "weight_decay" not in taken
    arguments = {**config.arguments, "weight_decay": config.weight_decay} if is_asked else config.arguments
    own = load_callable("optimizer.name", config.name, arguments, code, where)

    def make(settings: Settings) -> optax.GradientTransformation:
        optimizer = own(learning_rate=settings.lr, weight_decay=settings.weight_decay)
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            kind = type(optimizer).__name__
            why = f"{config.name} returned a value of type {kind}, not an optax transformation"
            raise InputError([f"{where('optimizer.name')}: optimizer.name: {why}"])
        return optax.with_extra_args_support(optimizer)

    # As in a step, which has traced values: a function that converts them fails at the start.
    value = jax.ShapeDtypeStruct((), jnp.float32)
    jax.eval_shape(lambda x: (make(Settings(lr=x, weight_decay=x, clip=x)), None)[1], value)
    return make


def roles_of(model: Model, storage: Storage) -> object:
    """The role of each parameter, as a tree like theirs."""
    places = storage.model
    return jax.tree.unflatten(places.tree, [model.role(p.path, len(p.shape) - len(p.sliced)) for p in places.parameters])


def by_role(roles: object, labels: Mapping[Role, bool | str], *, default: bool | str) -> Callable[[Tree], object]:
    """A function from a tree of parameters to a tree of labels: of each parameter its role's.

    A parameter is looked up by its path, because optax also calls this with trees in which some parameters are left out.
    """
    by_path = {path: labels.get(role, default) for path, role in jax.tree.leaves_with_path(roles)}
    return lambda params: jax.tree.map_with_path(lambda path, _: by_path[path], params)


def with_moments_in(optimizer: optax.GradientTransformation, dtype: jax.typing.DTypeLike) -> optax.GradientTransformation:
    """The optimizer with its moments rounded to `dtype`, to nearest, after each update, which it computes in f32.

    Moments are the floating arrays of its state that have the shape of a parameter.
    """

    def init(params: Tree) -> optax.OptState:
        return _cast(optimizer.init(params), params, dtype)

    def update(updates: Tree, state: optax.OptState, params: Tree | None = None) -> tuple[Tree, optax.OptState]:
        updates, state = optimizer.update(updates, _cast(state, params, jnp.float32), params)
        return updates, _cast(state, params, dtype)

    return optax.GradientTransformation(init, update)


def _cast(state: optax.OptState, params: Tree | None, dtype: jax.typing.DTypeLike) -> optax.OptState:
    # By shape, since a state does not say which of its arrays are moments. Counts are integers, so a scalar parameter is safe, too.
    shapes = {x.shape for x in jax.tree.leaves(params)}
    return jax.tree.map(lambda x: x.astype(dtype) if x.shape in shapes and jnp.issubdtype(x.dtype, jnp.floating) else x, state)


def settings_of_step(config: OptimizerConfig | OwnOptimizer, num_steps: int, step: int) -> np.ndarray:
    """The `Settings` of a step, counted from 1, as f32[3]."""
    return np.array([learning_rate(config, num_steps, step), config.weight_decay, config.clip or 0.0], np.float32)


def learning_rate(config: OptimizerConfig | OwnOptimizer, num_steps: int, step: int) -> float:
    """The learning rate of a step, counted from 1: warm-up, then cosine, wsd (arXiv 2404.06395) or constant."""
    done, warmup = step - 1, config.warmup
    if done < warmup:
        # The first update already moves: warm-up starts at lr / (warmup + 1), not at 0.
        first = config.lr / (warmup + 1)
        return first + (config.lr - first) * done / warmup
    total, done = max(num_steps - warmup, 1), done - warmup
    final = config.lr * config.final_lr
    if config.schedule == "cosine":
        return final + (config.lr - final) * 0.5 * (1 + math.cos(math.pi * min(done / total, 1.0)))
    if config.schedule == "wsd":
        # It falls in at least one update, and in none of the warm-up.
        falling = min(max(round(config.decay * num_steps), 1), total)
        return config.lr + (final - config.lr) * min(max((done - (total - falling)) / falling, 0.0), 1.0)
    return config.lr
