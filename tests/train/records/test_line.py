"""The line of a step at several widths."""

import pytest

from train.records.summary import step_line
from train.settings.formats import duration_text, short_text

LOSS = {"loss": 2.4513, "grad_norm": 1.2345, "lr": 3e-4, "epoch": 0.25}
CPU = LOSS | {"samples": 960, "tokens": 122_880, "time": 1.7e9, "step_time_s": 0.15, "tokens_per_s": 27_343.1, "mfu": None, "eta_s": 750.0}
GPU = CPU | {
    "mfu": 0.412,
    "memory_bytes": 25e9,
    "memory_peak_bytes": 101e9,
    "memory_limit_bytes": 139e9,
    "tokens": 1.23e12,
    "tokens_per_s": 273_431.0,
    "eta_s": 1e5,
}


@pytest.mark.parametrize(
    ("width", "metrics", "line"),
    [
        (70, CPU, "step 130/300  loss 2.4513   123k tok  27.3k/s  eta 12m30s"),
        (80, CPU, "step 130/300  loss 2.4513  grad_norm 1.2345   123k tok  27.3k/s  eta 12m30s"),
        (
            120,
            CPU,
            "step 130/300  loss 2.4513  grad_norm 1.2345  lr 3.00e-04  150 ms  epoch 0.25   123k tok  27.3k/s  eta 12m30s",
        ),
        (80, GPU, "step 130/300  loss 2.4513  1.23T tok   273k/s  101/139 GB  mfu 41%  eta  1d03h"),
        (50, GPU, "step 130/300  loss 2.4513  1.23T tok   273k/s"),
        (80, {"eval_loss": 2.0}, "step 130/300  eval_loss 2.0000"),
        (80, {"eval_loss": 2.0, "eval_loss/web": 1.5, "eval_loss/code": 2.5}, "step 130/300  eval_loss 2.0000  web 1.5000  code 2.5000"),
        (10, {"loss": 2.0, "tokens": 5}, "step 130/300 loss 2.0000"),
    ],
)
def test_what_fits_is_shown(width, metrics, line):
    assert step_line(130, 300, metrics, width) == line


def test_a_long_run_fits_80_columns():
    line = step_line(120_000, 500_000, GPU, 80)
    assert line == "step 120000/500000 loss 2.4513 1.23T tok  273k/s 101/139 GB mfu 41% eta  1d03h"
    assert len(line) <= 80


@pytest.mark.parametrize("full", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("unknown", [("eta_s",), ()])
def test_the_first_lines_leave_room_for_the_speed(full, unknown):
    first = {name: None if name in ("tokens_per_s", "step_time_s", "mfu", *unknown) else value for name, value in full.items()}
    for width in range(60, 101, 4):
        shown = [["grad_norm" in step_line(30, 300, row, width), "lr " in step_line(30, 300, row, width)] for row in (first, full)]
        assert shown[0] == shown[1], width


def test_metrics_of_the_users_own_come_before_ours():
    metrics = {"loss": 2.0, "lr": 0.1, "accuracy": 0.98, "samples": 5e4, "samples_per_s": 1234.0, "eta_s": 5.0}
    assert step_line(130, 300, metrics, 80) == "step 130/300  loss 2.0000  accuracy 0.9800  50.0k samples  1.23k/s  eta     5s"


@pytest.mark.parametrize("width", range(40, 161, 7))
def test_no_line_is_too_long(width):
    for metrics in (CPU, GPU, GPU | {f"metric_{n}": n / 7 for n in range(20)}):
        assert len(step_line(12_000, 50_000, metrics, width)) <= width


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (999.7, "1.00k"), (12_345, "12.3k"), (123_456, "123k"), (1.234e9, "1.23G")],
)
def test_counts(count, text):
    assert short_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (60, "1m00s"), (750, "12m30s"), (3720, "1h02m"), (1e5, "1d03h"), (8e6, "92d14h")]
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text
