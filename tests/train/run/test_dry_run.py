"""A dry run computes bytes per device from shapes, and writes nothing."""

import re

import pytest

from train.__main__ import main

NUM_PARAMETERS = 2 * 256 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32


@pytest.fixture
def dry_run(tiny_file, tmp_path, capsys):
    """Runs the command. Returns its output, and bytes per device by name."""

    def _dry_run(*overrides):
        assert main(["--config", str(tiny_file), f"run.dir={tmp_path}/run", *overrides, "--dry-run"]) == 0
        shown = capsys.readouterr().out
        table = shown.partition("Bytes per device")[2]
        return shown, dict(re.findall(r"^(.*?) {2,}(\S+ [KM]?B)$", table, re.MULTILINE))

    return _dry_run


def test_one_device(dry_run, tmp_path):
    shown, rows = dry_run()
    assert "Mesh: data 1 = 1 x cpu" in shown and re.search(r"^Data: .* to train on", shown, re.MULTILINE)
    assert f"{NUM_PARAMETERS:,} parameters" in shown
    assert rows["parameters"] == f"{NUM_PARAMETERS * 4 / 1000:.1f} KB"
    assert rows["optimizer state"] == f"{(NUM_PARAMETERS * 8 + 8) / 1000:.1f} KB"
    assert rows["batch"] == f"{3 * 16 * 32 * 4 / 1000:.1f} KB"
    assert not (tmp_path / "run").exists()


def test_parts_on_eight_devices(dry_run, rules_dir):
    shown, rows = dry_run("mesh={fsdp: 8}", f"rules={rules_dir}/fsdp.yaml")
    norms = 5 * 32
    assert re.search(r"layers/mlp/up_proj/kernel +layers/mlp +2x32x64 +\[null, fsdp, null\] +2.0 KB", shown)
    assert rows["parameters"] == f"{((NUM_PARAMETERS - norms) / 8 + norms) * 4 / 1000:.1f} KB"
    assert rows["batch"] == f"{3 * 2 * 32 * 4} B"
