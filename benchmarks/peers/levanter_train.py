"""Levanter's own training loop on a model of the given size, with the time of each step. Needs marin-levanter.

`python levanter_train.py SIZES FOLDER`, with SIZES as `peers.py` passes them, prints JSON: CPU-seconds and seconds from launch to the end
of the first step, and of each step after it. The tokens are random and already on the devices. Checkpoints, trackers and norms of every
parameter are off, because they take time without training.

Levanter runs as in its `train_lm`: `Trainer` with its hooks, model and optimizer in the default sharding (parameters by their dim "embed",
the batch over all devices), its Adam with weight decay and clipping, and each layer recomputed. Where `train_lm` leaves a choice, this
program takes the fastest on a CPU: attention without blocks.
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
    """Trains, and exits right after the last step, because the rest is not part of the measurement."""
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
    """Random tokens [batch, seq], all with weight 1."""
    shape = [axis.size for axis in axes]
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab"], shape, np.int32)
    return hax.shard(LmExample(hax.named(tokens, axes), hax.named(np.ones(shape, np.float32), axes)), mapping)


def loss(model: Any, example: LmExample, *, key: Any = None) -> Any:
    """The loss, as in `train_lm`."""
    return model.compute_next_token_loss(example, key=key)


if __name__ == "__main__":
    main()
