"""A plan is of the program that runs: its flags, given to one compilation, do what they do in XLA_FLAGS."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from plugin import needs_plugin

from jgt.planner.compiled import compile_function
from jgt.planner.hardware.target import Target
from jgt.planner.options import compile_with
from jgt.planner.plan import plan
from train.config import load
from train.plan.make import setup_maker
from train.setup.xla import PRESETS

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
GPUS = "h100:1x8"
OVERRIDES = ["rules=jgt:fsdp", "mesh={fsdp: 8}", "model.layers=2", "model.seq=64"]
X = jax.ShapeDtypeStruct((8,), jnp.float32)


def compiled_text(flags=None):
    """The computations of the compiled step of a small run for GPUs, without lines of Python and the name that no other program has."""
    target = Target.parse(GPUS)
    setup = setup_maker(load(str(QUICKSTART), OVERRIDES), target)(None)
    text = compile_function(setup.train_step(), setup.step_shapes, target, flags).text
    return re.sub(r", metadata=\{[^}]*\}|plan_[0-9a-f]{32}", "", text[text.index("\n%") :])


def text_of_run(flags, path):
    """The same, compiled by a process that has these flags in XLA_FLAGS, as a run has them."""
    given = [os.environ["XLA_FLAGS"], *(f"--{name}={value}" for name, value in flags.items())]
    program = f"import sys, pathlib; sys.path[:0] = {sys.path!r}; import test_options; pathlib.Path({str(path)!r})"
    command = [sys.executable, "-c", f"{program}.write_text(test_options.compiled_text())"]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": " ".join(given)}, check=True, timeout=300)
    return path.read_text()


@needs_plugin
@pytest.mark.parametrize("preset", ["gpu-overlap", pytest.param("gpu-pipeline", marks=pytest.mark.slow)])
def test_the_planned_program_is_the_one_that_a_run_compiles(preset, tmp_path):
    flags = PRESETS[preset]
    planned = compiled_text(flags)
    assert planned == text_of_run(flags, tmp_path / "text")
    # Each of the flags that later versions of XLA have renamed would be missed.
    assert planned != compiled_text({name: value for name, value in flags.items() if "pipelined" not in name})


@pytest.mark.parametrize("value", ["true", "false"])
@pytest.mark.parametrize("name", sorted(set().union(*PRESETS.values())))
def test_each_flag_of_a_preset_is_an_option(name, value):
    flags = {name: value if "enable" in name else "1"}
    compiled, refused = compile_with(jax.jit(jnp.sin).lower(X), flags)
    assert not refused and compiled.as_text()


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"xla_no_such_flag": "1"}, ["--xla_no_such_flag=1"]),
        ({"xla_gpu_all_gather_combine_threshold_bytes": "many"}, ["--xla_gpu_all_gather_combine_threshold_bytes=many"]),
        ({"xla_gpu_enable_triton_gemm": "0", "xla_gpu_all_gather_combine_threshold_bytes": "1"}, []),
        ({"xla_gpu_enable_triton_gemm": "2", "xla_gone": "true"}, ["--xla_gpu_enable_triton_gemm=2", "--xla_gone=true"]),
    ],
)
def test_a_flag_that_a_plan_cannot_have_is_a_finding(flags, refused):
    found = plan(jnp.sin, X, flags=flags)
    assert [f.kind for f in found.findings] == ["flag"] * len(refused)
    for flag, warning in zip(refused, found.warnings, strict=True):
        assert f"the plan is without {flag}: " in warning
    kept = [name for name in flags if not any(name in flag for flag in refused)]
    assert all(name in found.assumptions[0] for name in kept)


def test_other_errors_of_a_compilation_are_raised():
    class Broken:
        def compile(self, compiler_options):
            raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        compile_with(Broken(), {"xla_gpu_enable_triton_gemm": "true"})
