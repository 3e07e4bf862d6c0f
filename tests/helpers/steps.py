"""Training steps of losses that are small enough to write down, and the roles of a model's parameters."""

import jax
import numpy as np

import jgt
from jgt.rules import Rules
from train.step.gradients import GradientSum
from train.step.objective import Objective, Part
from train.step.optimizer import roles_of as roles_at
from train.step.step import make_train_step


def objective_of(loss):
    """The objective of loss(params, batch), a sum over `weights`."""

    def plain(params, variables, batch):
        return loss(params, batch), Part(None, {}, variables)

    return Objective(loss=plain, evaluated=plain, is_token_loss=True)


def step_of(loss, optimizer, clip=None, pin_gradients=lambda tree: tree, accumulate=1, **options):
    """step(state, batch) of loss(params, batch) with an optax optimizer."""
    options |= {"gradients": GradientSum(parts=accumulate, pin=pin_gradients), "clips": clip is not None}
    step = make_train_step(objective_of(loss), lambda settings: optimizer, **options)
    return lambda state, batch: step(state, batch, np.float32([0, 0, clip or 0]))


def roles_of(model, inputs):
    """The roles of a model's parameters, as the places where a call uses them show."""
    params, variables = jax.eval_shape(model.init, jax.random.key(0))

    def call(params, inputs):
        return model.run(lambda module: module(inputs), params, variables, True)[0]

    sharded = jgt.shard(call, Rules(default="replicate"), jgt.abstract_mesh({"data": 1}))
    return roles_at(model, sharded.storage_for((params, inputs)))
