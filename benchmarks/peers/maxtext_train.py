"""MaxText's own training loop on a model of the given size, with the time of each step. Needs MaxText.

`python maxtext_train.py SIZES FOLDER`, with SIZES as `peers.py` passes them, prints JSON: CPU-seconds and seconds from launch to the end
of the first step, and of each step after it. SIZES may have more of MaxText's settings under `settings`. The data are
synthetic. Checkpoints, TensorBoard and cloud services are off, because they take time without training; the compile cache is off too.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

SIZES, FOLDER = json.loads(sys.argv[1]), sys.argv[2]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={SIZES['devices']} {os.environ.get('XLA_FLAGS', '')}"
os.environ |= {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}

import jax  # noqa: E402
import maxtext  # noqa: E402
from maxtext.common.metric_logger import MetricLogger  # noqa: E402
from maxtext.trainers.pre_train import train  # noqa: E402
from step_clock import StepClock  # noqa: E402

SETTINGS = {
    "run_name": "peer",
    "base_output_directory": FOLDER,
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "jax_cache_dir": "",
    "steps": SIZES["steps"],
    "decoder_block": "llama2",
    "attention": "dot_product",
    "dtype": "float32",
    "weight_dtype": "float32",
    "remat_policy": "full",
    "opt_type": "adamw",
    "base_emb_dim": SIZES["embed"],
    "base_num_query_heads": SIZES["heads"],
    "base_num_kv_heads": SIZES["kv_heads"],
    "head_dim": SIZES["embed"] // SIZES["heads"],
    "base_mlp_dim": SIZES["ffn"],
    "base_num_decoder_layers": SIZES["layers"],
    "vocab_size": SIZES["vocab"],
    "max_target_length": SIZES["seq"],
    "per_device_batch_size": SIZES["batch"] / SIZES["devices"],
    **{f"ici_{axis}_parallelism": size for axis, size in SIZES["mesh"].items()},
    **SIZES.get("settings", {}),
}


def main() -> None:
    """Trains, and exits right after the last step, because the rest is not part of the measurement."""
    clock = StepClock()
    found: dict[str, Any] = {"settings": SETTINGS}
    iteration, write_setup = train.training_loop_iteration, MetricLogger.write_setup_info_to_tensorboard

    def counted(logger: Any, params: Any) -> None:
        found["parameters"] = sum(x.size for x in jax.tree.leaves(params))
        write_setup(logger, params)

    def timed(state: dict[str, Any], *arguments: Any) -> None:
        iteration(state, *arguments)
        jax.block_until_ready(jax.tree.leaves(state["state"]))
        if clock.tick() == SIZES["steps"]:
            versions = {name: metadata.version(name) for name in ("maxtext", "jax", "jaxlib", "flax")}
            print(json.dumps(found | clock.found() | {"versions": versions}), flush=True)
            os._exit(0)

    train.training_loop_iteration, MetricLogger.write_setup_info_to_tensorboard = timed, counted
    config = Path(maxtext.__file__).parent / "configs" / "base.yml"
    train.main(["train", str(config), *(f"{key}={value}" for key, value in SETTINGS.items())])


if __name__ == "__main__":
    main()
