"""`jgt doctor` names the faults that are planted here. GPUs, drivers and cables are fakes: files and answers as theirs would be."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train.doctor import devices
from train.doctor.__main__ import main
from train.doctor.machine import Machine

GB = 10**9
ROOMY = (500 * GB, 400 * GB, 100 * GB)


@pytest.fixture
def machine(tmp_path):
    """Makes a machine whose files are below a folder: a healthy one with two GPUs, unless changes say otherwise."""

    def _machine(*, gpus=2, driver_version="580.65.06", links="4: ACTIVE", **changes):
        for n in range(gpus):
            (tmp_path / "dev" / f"nvidia{n}").parent.mkdir(exist_ok=True)
            (tmp_path / "dev" / f"nvidia{n}").touch()
        for path, text in {
            "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX Open Kernel Module  {driver_version}  Release Build",
            "sys/class/infiniband/mlx5_0/ports/1/state": links,
            "sys/class/net/eth0/mtu": "1500",
        }.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        places = {name: tmp_path / name for name in ("dev", "proc", "sys")}
        well = {"usage": lambda _: ROOMY, "driver": lambda: 0, "cuda": lambda: 13, "clock": lambda: 0, "files": lambda: 65_536}
        return Machine(**{"folder": tmp_path, "environment": {}, **places, **well, **changes})

    return _machine


def faults(machine):
    return [f"{one.what}: {one.text}" for one in machine.examine() if one.state == "fault"]


def test_a_healthy_machine_has_no_fault(machine):
    found = [*machine().examine()]
    assert {one.state for one in found} == {"ok"}, found
    assert [one.what for one in found] == ["disk", "clock", "driver", "InfiniBand"]


def missing():
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


FAULTS = {
    "full disk": ({"usage": lambda _: (500 * GB, 499 * GB, GB // 2)}, "disk: ", "only 500.0 MB are free"),
    "small shared memory": (
        {"usage": lambda path: (64 * 2**20, 0, 64 * 2**20) if path.name == "shm" else ROOMY},
        "shared memory: ",
        "--shm-size=16g",
    ),
    "JAX without CUDA": ({"cuda": lambda: None}, "GPUs: ", "the system shows 2, but JAX's plugin for CUDA is missing"),
    "old driver": ({"driver_version": "550.54.15"}, "driver: ", "550.54.15: the wheels for CUDA 13 need 580 or newer"),
    "driver and library differ": ({"driver": lambda: 18}, "driver: ", "another version of it than its library: restart the machine"),
    "no library of the driver": ({"driver": missing}, "driver: ", "docker run --gpus all"),
    "interface of NCCL": ({"environment": {"NCCL_SOCKET_IFNAME": "ib0,bond"}}, "network: ", "this machine has eth0"),
    "cable": ({"links": "1: DOWN"}, "InfiniBand: ", "mlx5_0 port 1 is 1: DOWN"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_machine_is_named(machine, name):
    changes, what, why = FAULTS[name]
    (found,) = faults(machine(**changes))
    assert found.startswith(what) and why in found


def test_a_folder_that_cannot_be_written_and_a_port_that_is_taken(machine, tmp_path):
    (tmp_path / "file").touch()
    (found,) = faults(machine(folder=tmp_path / "file"))
    assert "Not a directory. Choose another run.dir" in found
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = faults(machine(port=port))
        assert found.startswith(f"port: {port}: Address already in use")
    assert not faults(machine(port=port))


def test_notes_about_what_a_run_may_do_without(machine, tmp_path):
    laptop = machine(gpus=0, cuda=lambda: None, clock=lambda: 5, files=lambda: 256)
    notes = {one.what: one.text for one in laptop.examine() if one.state == "note"}
    assert "no NVIDIA GPU, nor the plugin that plans for GPUs: pip install 'jgt[plan-gpu]'" in notes["GPUs"]
    assert "adjtimex" in notes["clock"] and "ulimit -n" in notes["open files"] and not faults(laptop)


WELL = {"devices": 8, "local": 4, "kind": "H100", "platform": "gpu", "gpus": 4, "clock": 0.01, "right": True, "seconds": 1e-3, "gb_s": 0.1}
ANSWERS = {
    "well": ({}, None),
    "clock": ({"clock": -7.25}, "clock: process 1: -7.2 s beside the first process's"),
    "GPUs that JAX does not see": ({"platform": "cpu"}, "although the system shows 4 GPUs"),
    "wrong sum": ({"right": False}, "its sum is wrong"),
    "heat": ({"slowed": "hw thermal"}, "GPUs: process 1: slowed by hw thermal"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_fault_in_the_answer_of_a_process_is_named(name):
    changes, expected = ANSWERS[name]
    found = [*devices.diagnoses_in("process 1: ", 0, json.dumps({**WELL, "slowed": "", **changes}), "")]
    faulty = [f"{one.what}: {one.text}" for one in found if one.state == "fault"]
    assert expected in faulty[0] if expected else not faulty
    assert "signal 9: one / two" in next(devices.diagnoses_in("", -9, "", "one\ntwo\n")).text


def test_an_all_reduce_that_hangs_ends_in_time(monkeypatch):
    monkeypatch.setattr(devices, "_CODE", "import time; time.sleep(600)")
    begun = time.monotonic()
    (found,) = devices.ask_devices([None], [dict(os.environ)], 0.5)
    assert found.state == "fault" and "no answer within 0 s" in found.text and time.monotonic() - begun < 10


def test_wrong_flags_are_input(capsys):
    assert main(["--process", "1", "--processes", "2"]) == 2
    assert "--coordinator: missing" in capsys.readouterr().err


def doctor(*flags):
    command = [sys.executable, "-m", "jgt", "doctor", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return done.returncode, [one for one in json.loads(done.stdout) if one["what"] not in ("disk", "clock", "GPUs", "open files")]


@pytest.mark.slow
def test_two_processes_add_their_numbers():
    code, found = doctor("--processes", "2")
    assert code == 0 and [one["what"] for one in found] == ["devices", "all-reduce"] * 2


@pytest.mark.slow
def test_a_peer_that_is_missing_is_named():
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    code, (_, found) = doctor("--coordinator", f"localhost:{port}", "--processes", "2", "--process", "0", "--seconds", "25")
    assert code == 1 and found["state"] == "fault" and "process 1 did not come within 20 s" in found["text"], found
