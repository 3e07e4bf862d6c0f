"""Runs in their own processes: started, watched from outside, and killed at the end of a test."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 100
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}


def free_port():
    """A free port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class Nursery:
    """Starts `train` quickly, by fork. A context manager. environment: variables for all processes."""

    def __init__(self, cache, root, environment=None):
        environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(root)} | (environment or {})
        command = [sys.executable, str(Path(__file__).with_name("nursery.py")), str(cache)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._process as process:
            process.kill()

    def ask(self, **question):
        """Sends a question to the nursery. Returns its answer, a number."""
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, arguments, log, environment=None, first=""):
        """A process that runs `train` with these arguments and variables, after some Python code."""
        return Child(self, self.ask(arguments=arguments, log=str(log), first=first, environment=environment or {}))


class Child:
    """A process of a nursery, with the methods of subprocess.Popen."""

    def __init__(self, nursery, pid):
        self._nursery, self.pid = nursery, pid
        self.returncode = None

    def poll(self):
        """The exit code, or None while it runs."""
        if self.returncode is None and Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            self.returncode = self._nursery.ask(wait=self.pid)
        return self.returncode

    def wait(self, timeout=SECONDS):
        """Waits for the end of the process. Returns the exit code, or raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs")
            time.sleep(0.05)
        return self.returncode

    def send_signal(self, number):
        """Sends a signal if the process is still running."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Processes:
    """Python processes that write their output to files. A context manager, which ends all of them.

    environment: variables in addition to ENVIRONMENT. With a nursery, the commands are only the arguments of `train`, and `first` is, by
    process, Python code that runs before.
    """

    def __init__(self, folder, commands, root, environment=None, nursery=None, first=None):
        self.logs = [folder / f"{i}.log" for i in range(len(commands))]
        self._all = []
        variables = os.environ | ENVIRONMENT | (environment or {})
        for process, (command, log) in enumerate(zip(commands, self.logs, strict=True)):
            if nursery is not None:
                self._all.append(nursery.start(command, log, environment, (first or {}).get(process, "")))
                continue
            with log.open("w") as file:
                started = subprocess.Popen(
                    [sys.executable, *command], cwd=root, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
            self._all.append(started)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._all:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def send(self, process, number):
        """Sends a signal to one process."""
        self._all[process].send_signal(number)

    def wait(self, process, seconds=SECONDS):
        """Waits for one process. Returns its exit code."""
        return self._all[process].wait(timeout=seconds)

    def wait_all(self, seconds=SECONDS):
        """Waits for all processes. Returns their exit codes."""
        return [process.wait(timeout=seconds) for process in self._all]

    def pid(self, process):
        """The number that the system has for one process."""
        return self._all[process].pid

    def output(self, process):
        """The output of one process."""
        return self.logs[process].read_text()


def wait_for_step(run, step):
    """Waits until a step of a run is logged."""
    _wait(lambda: any(row["step"] >= step for row in rows(run / "metrics.jsonl")), f"{run} has not come to step {step}")


def wait_for_path(path):
    """Waits until a file or folder exists."""
    _wait(path.exists, f"there is no {path}")


def _wait(reached, otherwise):
    deadline = time.monotonic() + SECONDS
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.05)


def rows(path):
    """The rows of the complete lines of a .jsonl file."""
    return (
        [json.loads(line) for line in Path(path).read_text().splitlines(keepends=True) if line.endswith("\n")]
        if Path(path).exists()
        else []
    )


def flags(port, count, process):
    """The flags that join a process to the others."""
    return ["--coordinator", f"localhost:{port}", "--processes", str(count), "--process", str(process)]


def run_both(folder, arguments, root):
    """Runs two Python processes with arguments(port, process). Returns their outputs."""
    port = free_port()
    with Processes(folder, [arguments(port, i) for i in range(2)], root) as processes:
        codes, outputs = processes.wait_all(), [processes.output(i) for i in range(2)]
    assert codes == [0, 0], outputs
    return outputs
