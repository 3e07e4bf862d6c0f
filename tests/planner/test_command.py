"""`jgt plan`: exit codes, what it prints, what it writes, and what it refuses."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import pytest
from plugin import needs_plugin

from jgt import document
from jgt.planner import described as topology
from jgt.planner.hardware.chip import chip_names
from jgt.planner.hardware.target import Target
from train.plan.__main__ import main

RULES = Path(__file__).parents[2] / "configs" / "rules"
CHIPS = Path(__file__).parents[2] / "jgt" / "planner" / "hardware" / "chips"
GPUS = "h100:1x8"
RUN = {
    "run": {"name": "small"},
    "model": {"kind": "llama", "layers": 1, "embed": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 64, "seq": 16},
    "mesh": {"data": 2, "tensor": 4},
    "rules": str(RULES / "tensor.yaml"),
    "data": {"source": "stdlib"},
    "train": {"steps": 1, "batch": 8},
}


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly():
    """Turns off the last passes of XLA on CPU, which change nothing that these tests look at."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, with the config of a small run."""
    monkeypatch.chdir(tmp_path)
    write("run.yaml")
    return tmp_path


def write(name, **changes):
    """Writes the config of a run."""
    Path(name).write_text(document.dump(RUN | changes))


@pytest.fixture
def command(capsys):
    """Runs the command. Returns its exit code, stdout and stderr."""

    def _command(*arguments):
        code = main(arguments)
        return code, *capsys.readouterr()

    return _command


@pytest.fixture
def refused(command):
    """Runs the command, which must refuse its input. Returns the problems."""

    def _refused(*arguments):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        return err.splitlines()

    return _refused


# ---------------------------------------------------------------------------------------------- what it refuses


def test_an_unknown_chip(refused):
    (problem,) = refused("--config", "run.yaml", "--target", "mi300:1x8")
    assert problem.startswith("target mi300:1x8: 'mi300' is not a chip that jgt knows.")
    assert all(name in problem for name in chip_names())


@pytest.mark.parametrize("target", ["h100", "h100:8", "h100:0x8", "h100:1x0"])
def test_a_target_without_hosts_and_gpus(refused, target):
    (problem,) = refused("--config", "run.yaml", "--target", target)
    assert problem.startswith(f"target {target}: ") and "h100:8x8" in problem


@pytest.mark.parametrize("arguments", [["--target", "h100:2x8"], ["--devices", "16"]])
def test_devices_that_the_mesh_does_not_have(refused, arguments):
    (problem,) = refused("--config", "run.yaml", *arguments)
    line = Path("run.yaml").read_text().splitlines().index("mesh:") + 1
    place, _, said = problem.partition(": ")
    assert place.startswith("run.yaml:") and int(place.rpartition(":")[2]) in (line, line + 1)
    assert "16" in said and "8" in said


def test_a_chip_file_and_figures_of_a_chip(refused):
    Path("mine.yaml").write_text((CHIPS / "h100.yaml").read_text())
    target = Target.parse("mine:2x8", "mine.yaml", ["nic_gbs=25", "hbm_gb=96"])
    assert (target.chip.links["nic"].gbs, target.chip.hbm_gb, target.text) == (25, 96, "mine:2x8 with nic_gbs=25, hbm_gb=96")
    (problem,) = refused("run.yaml", "--target", GPUS, "--chip", "mine.yaml")
    assert "describes the chip 'mine'" in problem and "--target mine:8x8" in problem
    problems = refused("run.yaml", "--target", GPUS, "--set", "nic_gsb=25", "--set", "hbm_gb=0", "--set", "nic_gbs")
    assert problems[0].startswith("--set nic_gsb=25: the chip has no figure 'nic_gsb'. Did you mean 'nic_gbs'? Its figures: ")
    assert "hbm_gbs" in problems[0] and "KEY=VALUE" in problems[1] and "must be greater than 0" in problems[2]


def test_options_about_a_target_need_one(refused):
    problems = refused("run.yaml", "--set", "nic_gbs=25", "--price", "prices.yaml")
    assert [problem.split(" is about")[0] for problem in problems] == ["--set", "--price"]


def test_prices_that_are_none(refused):
    Path("prices.yaml").write_text("h10: 2\nh200: free\n")
    problems = refused("run.yaml", "--target", GPUS, "--price", "prices.yaml")
    assert problems[0].startswith("prices.yaml:1: h10: is not a chip") and problems[1].startswith(
        "prices.yaml:2: h200: must be the dollars"
    )
    assert problems[2] == "prices.yaml: the price of h100 is missing. Add a line such as h100: 2.5"


def test_a_blank_after_the_colon_is_missing(refused):
    (problem,) = refused("run.yaml", "mesh={data:8}")
    assert problem.endswith("mesh.data:8: a blank is missing after the colon. Write data: 8")


def test_two_layouts_need_a_run(refused):
    (problem,) = refused("--diff", "mesh={data: 8}", "mesh={tensor: 8}")
    assert problem.endswith("the run's file is missing. Write jgt plan run.yaml --diff A B")


def test_a_config_is_needed(refused):
    assert refused()[0].startswith("command line: a run's file is missing")


def test_all_problems_are_told_at_once(refused):
    write("run.yaml", mesh={"data": 2, "tensr": 4}, budget={"peak_gbs": 1})
    problems = "\n".join(refused("--config", "run.yaml", "--target", "mi300"))
    assert "is not a chip that jgt knows" in problems and "'peak_gb'" in problems


def test_a_lock_of_another_format(refused):
    Path("plan.lock").write_text("something else\n")
    (problem,) = refused("--config", "run.yaml", "--check", "plan.lock")
    assert problem.startswith("plan.lock:1: ") and "'something else'" in problem and "--lock plan.lock" in problem


def test_the_plugin_is_missing(refused, monkeypatch):
    monkeypatch.setattr(topology.util, "find_spec", lambda name: None)
    (problem,) = refused("--config", "run.yaml", "--target", GPUS)
    assert "needs JAX's CUDA plugin" in problem and "pip install 'jgt[plan-gpu]'" in problem


def test_the_plugin_is_not_of_this_jaxlib(refused, monkeypatch):
    real = metadata.version
    monkeypatch.setattr(topology.util, "find_spec", lambda name: name)
    monkeypatch.setattr(topology.metadata, "version", lambda name: "0.0.1" if "plugin" in name else real(name))
    (problem,) = refused("--config", "run.yaml", "--target", GPUS)
    assert "the CUDA plugin is version 0.0.1" in problem and f"jaxlib is {real('jaxlib')}" in problem


# ---------------------------------------------------------------------------------------------- what it plans


def test_a_plan_its_page_its_lock_and_its_budget(command, folder):
    write("run.yaml", budget={"peak_gb": 1, "layers/attn": {"all-gather": 0}})
    code, out, err = command("--config", "run.yaml", "--json", "--html", "plan.html", "--lock", "plan.lock")
    assert code == 0
    assert err.splitlines() == ["Wrote plan.html", "Wrote plan.lock"]
    assert Path("plan.html").read_text().startswith("<!doctype html>")
    found = json.loads(out)
    assert found.keys() >= {
        "target",
        "devices",
        "mesh",
        "memory",
        "flops_per_device",
        "step_time_ms",
        "collectives",
        "rematerializations",
        "warnings",
    }
    assert (found["target"], found["devices"], found["mesh"]) == ("cpu", 8, {"data": 2, "tensor": 4})
    assert found["memory"].keys() >= {"args_bytes", "temp_bytes", "peak_bytes", "fits"}
    assert found["step_time_ms"] is None and found["memory"]["fits"] is None
    assert found["flops_per_device"] > 0 and found["rematerializations"] == [] == found["warnings"]
    assert found["collectives"]
    for row in found["collectives"]:
        assert row.keys() >= {"kind", "dtype", "bytes", "count", "axes", "signal", "phase", "source"}
        assert set(row["axes"]) <= {"data", "tensor"} and row["phase"] in ("forward", "backward", "recompute")

    # A disk that is full.
    code, _, err = command("--config", "run.yaml", "--json", "--html", "/dev/full", "--lock", "other.lock")
    assert (code, err) == (1, "Wrote other.lock\n/dev/full: cannot be written: No space left on device\n")

    # Another budget, and another rule than the one that was locked.
    rules = document.read(RULES / "tensor.yaml").plain()
    rules["signals"]["layers/mlp"]["params"] = {}
    del rules["signals"]["layers/mlp"]["tensors"]
    Path("rules.yaml").write_text(document.dump(rules))
    write("run.yaml", rules="rules.yaml", budget={"sent_gb": 0, "layers/attn": {"all-reduce": 0}})
    code, out, err = command("--config", "run.yaml", "--check", "plan.lock")
    assert code == 1
    assert "Plan for cpu: data 2 x tensor 4 = 8 devices" in out
    total, attention, changed, *lines = err.splitlines()
    assert "budget.sent_gb: " in total and "The largest part: layers/attn" in total
    assert "budget.layers/attn.all-reduce: " in attention and "train/models/attention.py:" in attention
    assert all(text.startswith("run.yaml:") for text in (total, attention))
    assert changed.startswith("plan.lock: the plan has changed") and "--lock plan.lock" in changed
    assert any(line.startswith("-layers/mlp  all-reduce  f32  tensor  ") for line in lines)
    assert not any("layers/attn" in line for line in lines)


@pytest.mark.slow
def test_two_rules_files_side_by_side(command):
    code, out, err = command("--config", "run.yaml", "--diff", str(RULES / "tensor.yaml"), str(RULES / "replicated.yaml"))
    assert (code, err) == (0, "")
    assert "peak_bytes" in out and "sent_bytes" in out and "flops_per_device" in out
    assert any(line.split()[:3] == ["layers/mlp", "all-reduce", "tensor"] for line in out.splitlines())


def test_two_meshes_side_by_side(command):
    other = f"mesh={{data: 8}} rules={RULES / 'replicated.yaml'}"
    code, out, err = command("--diff", "run.yaml", other)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "What differs" and any(line.split() == ["mesh", *["data", "2", "x", "tensor", "4", "data", "8"]] for line in lines)
    assert not [line for line in lines if line.endswith(" ")]


def test_two_runs_side_by_side(command):
    write("b.yaml", rules=str(RULES / "replicated.yaml"), mesh={"data": 8})
    code, out, err = command("--diff", "run.yaml", "b.yaml", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    totals = found["totals"]
    assert totals["args_bytes"]["b"] > 2 * totals["args_bytes"]["a"] > 0
    assert totals["flops_per_device"]["a"] == totals["flops_per_device"]["b"]
    rows = {(row["signal"], row["kind"], row["axes"]): (row["a"], row["b"]) for row in found["collectives"]}
    assert rows["layers/mlp", "all-reduce", "tensor"][1] == 0 < rows["layers/mlp", "all-reduce", "tensor"][0]


@pytest.mark.slow
@needs_plugin
def test_a_plan_for_gpus(command):
    write("run.yaml", budget={"step_ms": 1e-6})
    code, out, err = command("--config", "run.yaml", "--target", GPUS, "--json")
    found = json.loads(out)
    assert code == 1 and "budget.step_ms: " in err and "ms per step, but 1e-06 is allowed" in err
    assert found["target"] == GPUS and found["memory"]["fits"] is True and found["step_time_ms"] > 0
    assert found["version"] == 1 and found["timeline"] and found["step_time_caveat"] == ""
    assert sum(found["parts_ms"].values()) == pytest.approx(found["step_time_ms"], rel=1e-4)
    assert found["speed"]["tokens_per_s"] == pytest.approx(8 * 16 / found["step_time_ms"] * 1e3, rel=1e-4)
    assert found["assumptions"][0].startswith("XLA's flags: xla_gpu_enable_latency_hiding_scheduler=true, ")


def test_help_comes_before_jax():
    program = (
        "import sys\nfrom jgt.__main__ import main\ntry:\n    main(['plan', '--help'])\nfinally:\n"
        "    assert 'jax' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: jgt plan" in done.stdout and "--target" in done.stdout
