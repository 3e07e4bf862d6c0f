"""What a driver says, by a library of the same functions that a compiler makes here."""

import shutil
import subprocess

import pytest

from train.records.nvml import Gpus

SOURCE = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return index > 2 ? 2 : 0; }
int nvmlDeviceGetHandleByUUID(const char *name, void **handle) { *handle = (void *)3L; return strcmp(name, "GPU-x") ? 2 : 0; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *watts) { *watts = 100000 * (long)handle; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *bits) { *bits = (long)handle == 3 ? 0x44 : 0x4; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler is installed")
    path = tmp_path_factory.mktemp("nvml") / "libfake.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", str(path)], input=SOURCE, text=True, check=True)
    return path


@pytest.mark.parametrize(
    ("visible", "count", "found"),
    [
        ("", 2, {"power_w": 300.0}),
        ("1", 1, {"power_w": 200.0}),
        ("2,0", 2, {"power_w": 400.0, "slowed": "hw thermal"}),
        ("GPU-x", 1, {"power_w": 300.0, "slowed": "hw thermal"}),
        ("GPU-y", 1, {}),
        ("7", 1, {}),
        ("", 0, {}),
    ],
)
def test_the_power_and_the_reasons_of_the_gpus_that_a_process_sees(visible, count, found, library, monkeypatch):
    monkeypatch.setattr("train.records.nvml._LIBRARY", str(library))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Gpus(count).figures() == found


def test_without_a_driver_there_is_nothing(monkeypatch):
    monkeypatch.setattr("train.records.nvml._LIBRARY", "libnone-of-this-name.so.1")
    assert Gpus(2).figures() == {}
