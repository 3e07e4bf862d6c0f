"""Levanter's own training loop on a model of the given size, with the time of each step; runs where Levanter 1.1 is installed.

python levanter_train.py SIZES FOLDER, with SIZES as `peers.py` passes them, prints JSON: CPU-seconds and seconds from launch to the end
of the first step, and of each step after it. Random tokens; without wandb, Ray and checkpoints; weights and batch over all devices.

Written from Levanter's source and not run yet: see benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from typing import Any

SIZES, FOLDER = json.loads(sys.argv[1]), sys.argv[2]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={SIZES['devices']} {os.environ.get('XLA_FLAGS', '')}"
os.environ |= {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "disabled"}

import haliax as hax  # noqa: E402
import jax  # noqa: E402
from levanter.distributed import RayConfig  # noqa: E402
from levanter.logging import WandbConfig  # noqa: E402
from levanter.models.llama import LlamaConfig  # noqa: E402
from levanter.models.lm_model import LmExample  # noqa: E402
from levanter.trainer import OptimizerConfig, Trainer, TrainerConfig  # noqa: E402
from levanter.utils.jax_utils import parameter_count  # noqa: E402
from step_clock import StepClock  # noqa: E402

SETTINGS = {"fsdp": SIZES["devices"], "mp": "f32", "gradient_checkpointing": True, "gradient_checkpointing_block_size": 1, "weight_decay": 0.1}


def main() -> None:
    """Trains, and ends at once after the last step: what follows it is no part of the measurement."""
    model = LlamaConfig(
        seq_len=SIZES["seq"],
        hidden_dim=SIZES["embed"],
        intermediate_dim=SIZES["ffn"],
        num_layers=SIZES["layers"],
        num_heads=SIZES["heads"],
        gradient_checkpointing=True,
        gradient_checkpointing_block_size=1,
    )
    config = TrainerConfig(
        train_batch_size=SIZES["batch"],
        num_train_steps=SIZES["steps"],
        require_accelerator=False,
        run_base_dir=FOLDER,  # pyright: ignore[reportArgumentType]
        wandb=WandbConfig(mode="disabled"),
        ray=RayConfig(auto_start_cluster=False),
    )
    config.initialize(None)
    key, tokens_key = jax.random.split(jax.random.PRNGKey(0))
    optimizer = OptimizerConfig(weight_decay=SETTINGS["weight_decay"]).build(SIZES["steps"])
    trainer = Trainer(config, optimizer, lambda model, example, key=None: model.compute_loss(example, key=key).scalar())
    clock, found = StepClock(), {"settings": SETTINGS}

    def timed(info: Any) -> None:
        jax.block_until_ready(jax.tree_util.tree_leaves((info.model, info.opt_state)))
        if clock.tick() == SIZES["steps"]:
            versions = {name: metadata.version(name) for name in ("levanter", "haliax", "jax", "jaxlib")}
            print(json.dumps(found | clock.found() | {"loss": info.loss, "versions": versions}), flush=True)
            os._exit(0)

    with trainer.device_mesh, hax.axis_mapping(config.compute_axis_mapping):
        vocab = hax.Axis("vocab", SIZES["vocab"])
        state = trainer.initial_state(key, model_init=lambda: model.build(vocab, key=key))
        found["parameters"] = parameter_count(state.model)
        tokens = hax.shard(hax.random.randint(tokens_key, (config.TrainBatch, model.Pos), 0, SIZES["vocab"]))
        example = LmExample(tokens, hax.shard(hax.ones((config.TrainBatch, model.Pos))))
        trainer.add_hook(timed)
        trainer.train(state, [example] * SIZES["steps"])


if __name__ == "__main__":
    main()
