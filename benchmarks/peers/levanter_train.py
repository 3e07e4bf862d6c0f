"""Levanter's own training loop on a model of the given size, with the time of each step; runs where marin-levanter is installed.

python levanter_train.py SIZES FOLDER, with SIZES as `peers.py` passes them, prints JSON: CPU-seconds and seconds from launch to the end
of the first step, and of each step after it. Random tokens that are on the devices already; without what costs time and is not training:
checkpoints, trackers, norms of every parameter.

Levanter as its `train_lm` uses it: `Trainer` with its hooks, model and optimizer in its default sharding (parameters over "embed", batch
over all devices), its Adam with weight decay and clipping, each layer recomputed. Where it leaves it open, what is fastest here:
attention without blocks.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

SIZES, FOLDER = json.loads(sys.argv[1]), Path(sys.argv[2])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={SIZES['devices']} {os.environ.get('XLA_FLAGS', '')}"
os.environ |= {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "disabled"}

import haliax as hax  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from levanter.callbacks.watch import WatchConfig  # noqa: E402
from levanter.checkpoint import CheckpointerConfig  # noqa: E402
from levanter.layers.attention import AttentionBackend  # noqa: E402
from levanter.models.llama import LlamaConfig  # noqa: E402
from levanter.models.lm_model import LmExample  # noqa: E402
from levanter.optim.config import AdamConfig  # noqa: E402
from levanter.tracker import NoopConfig  # noqa: E402
from levanter.trainer import Trainer, TrainerConfig  # noqa: E402
from levanter.utils.jax_utils import parameter_count  # noqa: E402
from step_clock import StepClock  # noqa: E402

SETTINGS = {
    "max_seq_len": SIZES["seq"],
    "hidden_dim": SIZES["embed"],
    "intermediate_dim": SIZES["ffn"],
    "num_layers": SIZES["layers"],
    "num_heads": SIZES["heads"],
    "num_kv_heads": SIZES["kv_heads"],
    "gradient_checkpointing": True,
    "attn_backend": AttentionBackend.VANILLA,
}


def main() -> None:
    """Trains, and ends at once after the last step: what follows it is no part of the measurement."""
    clock = StepClock()
    model = LlamaConfig(**SETTINGS)
    config = TrainerConfig(
        train_batch_size=SIZES["batch"],
        num_train_steps=SIZES["steps"],
        require_accelerator=False,
        log_dir=FOLDER,
        log_jaxprs=False,
        log_xla_hlo=False,
        tracker=NoopConfig(),
        watch=WatchConfig(watch_targets=[]),
        checkpointer=CheckpointerConfig(base_path=str(FOLDER), save_interval=None, keep=None),
        load_checkpoint=False,
    )
    config.initialize()
    mesh = {axis: size for axis, size in config.device_mesh.shape.items() if size > 1}
    if mesh != {"data": SIZES["devices"]}:
        raise ValueError(f"the mesh is {mesh}, not data {SIZES['devices']}")
    model_key, training_key = jax.random.split(jax.random.PRNGKey(0))
    with Trainer(config, AdamConfig().build(SIZES["steps"]), loss) as trainer:
        vocab = hax.Axis("vocab", SIZES["vocab"])
        state = trainer.initial_state(training_key, model_init=lambda: model.build(vocab, key=model_key))
        found = {"settings": SETTINGS, "parameters": parameter_count(state.model)}

        def timed(info: Any) -> None:
            jax.block_until_ready(jax.tree.leaves(info.state))
            if clock.tick() == SIZES["steps"]:
                versions = {name: metadata.version(name) for name in ("marin-levanter", "jax", "jaxlib")}
                print(json.dumps(found | clock.found() | {"loss": info.loss, "versions": versions}), flush=True)
                os._exit(0)

        trainer.add_hook(timed)
        trainer.train(state, itertools.repeat(batch((config.TrainBatch, model.max_Pos), trainer.compute_axis_mapping)))


def batch(axes: tuple[hax.Axis, ...], mapping: Any) -> LmExample:
    """Random tokens [batch, seq], which all count."""
    shape = [axis.size for axis in axes]
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab"], shape, np.int32)
    return hax.shard(LmExample(hax.named(tokens, axes), hax.named(np.ones(shape, np.float32), axes)), mapping)


def loss(model: Any, example: LmExample, *, key: Any = None) -> Any:
    """As `train_lm` has it."""
    return model.compute_next_token_loss(example, key=key)


if __name__ == "__main__":
    main()
