"""Training steps of small models, by every kind of layout that the devices allow.

A step is more than its kernels measured alone: caches are shared, devices wait for one another, a processor under load runs at another
clock. The figures of a chip are fitted to kernels and to steps, and steps count more.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..config import Run, load
from ..setup import Setup, prepare
from .measured import Program


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """How a step is split. sizes: of the mesh's axes. rows: of the batch for each device."""

    name: str
    sizes: Mapping[str, int]
    rules: str
    rows: int = 2
    remat: str = "none"
    stages: int | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The sections of a run's file."""
        devices = int(np.prod(list(self.sizes.values())))
        pipeline = {"signal": "layers", "microbatches": self.stages}
        return {
            "mesh": dict(self.sizes),
            "rules": f"jgt:{self.rules}",
            "train": {"steps": 1, "batch": self.rows * devices, "remat": self.remat},
            **({} if self.stages is None else {"pipeline": pipeline}),
        }


_GPT = {"kind": "gpt", "layers": 2, "embed": 192, "heads": 4, "vocab": 512, "seq": 128}
_LLAMA = {"kind": "llama", "layers": 4, "embed": 384, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 1024, "seq": 128}
_WIDE = {"kind": "llama", "layers": 2, "embed": 768, "heads": 12, "kv_heads": 4, "ffn": 2048, "vocab": 2048, "seq": 128}
_LARGE = {
    "kind": "llama",
    "layers": 8,
    "embed": 2048,
    "heads": 16,
    "kv_heads": 8,
    "ffn": 7168,
    "vocab": 32000,
    "seq": 2048,
    "dtype": "bf16",
}
MODELS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {"cpu": {"gpt": _GPT, "llama": _LLAMA, "wide": _WIDE}, "cuda": {"llama": _LARGE}}
"""The models of the steps, by platform."""


def layouts(devices: int) -> Iterator[StepLayout]:
    """The layouts for a number of devices."""
    yield StepLayout(name="data", sizes={"data": devices}, rules="replicated")
    yield StepLayout(name="data, remat block", sizes={"data": devices}, rules="replicated", remat="block")
    if devices > 1:
        yield StepLayout(name="fsdp", sizes={"data": 1, "fsdp": devices}, rules="fsdp")
    if devices % 2 == 0:
        yield StepLayout(name="fsdp x tensor", sizes={"data": 1, "fsdp": devices // 2, "tensor": 2}, rules="fsdp_tensor")
        sizes = {"data": devices // 2, "fsdp": 1, "stage": 2, "tensor": 1}
        yield StepLayout(name="pipeline", sizes=sizes, rules="pipeline", stages=4)
    if devices % 4 == 0:
        yield StepLayout(name="tensor", sizes={"data": devices // 4, "tensor": 4}, rules="tensor")


def steps(platform: str, devices: Sequence[Any]) -> Iterator[Program]:
    """The step of each model in each layout."""
    for name, model in MODELS[platform].items():
        for layout in layouts(len(devices)):
            yield step_of(f"{name}, {layout.name}", {"model": model, **layout.document}, devices)


def step_of(name: str, document: Mapping[str, Any], devices: Sequence[Any]) -> Program:
    """The training step of a run with these sections, on random tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        # JSON is YAML.
        path.write_text(json.dumps({**document, "devices": {"virtual_cpu": len(devices)}}))
        return step_of_run(name, load(str(path)), devices)


def step_of_run(name: str, run: Run, devices: Sequence[Any]) -> Program:
    """The training step of a run, on random tokens."""
    setup = prepare(run, devices=devices)
    compiled = setup.train_step().lower(*setup.step_shapes).compile()
    return Program(name=name, kind="step", compiled=compiled, mesh=dict(setup.mesh.shape), begin=lambda: _Step(compiled, setup))


class _Step:
    """Runs a compiled step again and again, each time on the state that the previous run has returned."""

    def __init__(self, compiled: jax.stages.Compiled, setup: Setup):
        self._compiled, self._state, self._settings = compiled, setup.init(), setup.settings(1)
        random = np.random.default_rng(0)
        self._batch = {
            name: jax.device_put(random.integers(0, 2, x.shape).astype(x.dtype), setup.batch_shardings[name])
            for name, x in setup.batch_shapes.items()
        }

    def __call__(self) -> object:
        self._state, metrics = self._compiled(self._state, self._batch, self._settings)
        return self._state, metrics
