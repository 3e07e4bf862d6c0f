"""`train.remat: auto`: the first setting whose step fits."""

import jax
import pytest
from plugin import needs_plugin

from train.plan.__main__ import main
from train.run.opened import open_run
from train.setup import fit

ORDER = ["none", "attention", "matmuls", "block"]


@pytest.fixture
def taken(tiny, monkeypatch):
    """Opens a run whose steps need these bytes, by setting, on devices with this memory. Returns the setup and the settings tried."""

    def _taken(needs, memory):
        tried = []

        def memory_fits(stats, limit):
            tried.append(ORDER[len(tried)])
            return needs[tried[-1]] <= limit

        monkeypatch.setattr(fit, "_memory_of_devices", lambda: memory)
        monkeypatch.setattr(fit.Target, "memory_fits", memory_fits)
        return open_run(tiny("train.remat=auto"))[0], tried

    return _taken


NEEDS = {"none": 100, "attention": 80, "matmuls": 60, "block": 40}


@pytest.mark.parametrize(("memory", "wanted"), [(1000, "none"), (85, "attention"), (50, "block"), (10, "block")])
def test_the_first_setting_that_fits_is_taken(taken, memory, wanted):
    setup, tried = taken(NEEDS, memory)
    assert setup.program.remat == wanted and tried == ORDER[: ORDER.index(wanted) + 1]
    # What was compiled to find out is the step of the run.
    assert (setup.compile_train_step() is setup.compiled) == (NEEDS[wanted] <= memory)


def test_devices_that_report_no_memory_recompute_nothing(tiny, capsys):
    setup, _ = open_run(tiny("train.remat=auto"))
    assert setup.program.remat == "none" and setup.compiled is None


def test_a_step_that_xla_cannot_compile_for_lack_of_memory_does_not_fit(taken, monkeypatch):
    plain = fit.Setup.compile_train_step

    def compile_train_step(self):
        if self.program.remat == "none":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return plain(self)

    monkeypatch.setattr(fit.Setup, "compile_train_step", compile_train_step)
    setup, _ = taken({"none": 1}, 1000)
    assert setup.program.remat == "attention"


@needs_plugin
def test_a_plan_takes_what_fits_on_its_target(tiny_file, capsys):
    assert main([str(tiny_file), "--target", "h100:1x1", "train.remat=auto", "mesh={data: 1}", "model.dtype=bf16", "model.embed=64"]) == 0
    assert "train.remat: auto takes matmuls\n" in capsys.readouterr().err
