"""A Slurm of one machine, as Debian's packages slurmctld, slurmd and munge install it: started in a folder, and ended with it.

All three daemons run as the user of the test, on free ports, with a key, a socket and a state of their own, so they meet no other Slurm on
the machine. The node has as many CPUs and GPUs as a test asks for: Slurm only counts them.

    python tests/helpers/slurm.py        # starts one, until Ctrl-C
"""

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from runs import free_port

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
# Debian installs the daemons where only root's PATH leads.
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_SECONDS = 60

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait={kill_wait}
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={tasks} RealMemory=1000 Gres=gpu:{tasks} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing_commands():
    """The commands of Slurm and MUNGE that this machine does not have."""
    return [name for name in COMMANDS if shutil.which(name, path=PATH) is None]


class Slurm:
    """A controller and a node with `tasks` CPUs and GPUs. A context manager. folder: short, for the sockets in it."""

    def __init__(self, folder, tasks=4, kill_wait=30):
        self._folder = Path(folder)
        self._tasks, self._kill_wait = tasks, kill_wait
        self._daemons = []
        self.environment = {"PATH": PATH, "SLURM_CONF": str(self._folder / "slurm.conf")}

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            for job in self.run("squeue", "--noheader", "--format=%A").split():
                self.run("scancel", job)
            wait_for(lambda: not self.run("squeue", "--noheader"), "jobs remain", 20)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *command, environment=None, cwd=None, seconds=_SECONDS):
        """The output of a command of Slurm. Raises AssertionError if it fails."""
        variables = os.environ | self.environment | (environment or {})
        done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def submit(self, *arguments, environment=None, cwd=None):
        """Submits a job. Returns its number."""
        return self.run("sbatch", "--parsable", *map(str, arguments), environment=environment, cwd=cwd).strip()

    def state(self, job):
        """The state of a job: PENDING, RUNNING, COMPLETED, FAILED, ..."""
        return self._fields(job)["JobState"]

    def restarts(self, job):
        """How often a job was started again."""
        return int(self._fields(job)["Restarts"])

    def wait_until_over(self, job, seconds=_SECONDS):
        """Waits until a job has ended for good. Returns its state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(lambda: self.state(job) in over, f"job {job} has not ended", seconds)
        return self.state(job)

    def skip_delay(self, job):
        """Lets a requeued job start at once. Slurm waits two minutes, in which the node could clean up."""
        wait_for(lambda: self.state(job) == "PENDING", f"job {job} is not requeued")
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def logs(self):
        """What the daemons have written."""
        return "".join(f"\n{path.name}:\n{path.read_text()[-4000:]}" for path in self._folder.glob("*.log"))

    def _fields(self, job):
        words = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return dict(word.partition("=")[::2] for word in words)

    def _start(self):
        folder = self._folder
        host = socket.gethostname().partition(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir(mode=0o700)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        values = {"folder": folder, "host": host, "user": getpass.getuser(), "tasks": self._tasks, "kill_wait": self._kill_wait}
        ports = {"controller_port": free_port(), "node_port": free_port()}
        (folder / "slurm.conf").write_text(_CONF.format(**values, **ports))
        for gpu in range(self._tasks):
            (folder / f"gpu{gpu}").touch()
        (folder / "gres.conf").write_text("".join(f"Name=gpu File={folder}/gpu{gpu}\n" for gpu in range(self._tasks)))
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n")
        paths = {
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
            "key-file": "munge.key",
        }
        # force: the folder may lie below one that everyone may write to, as all temporary folders do.
        self._daemon("munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in paths.items()))
        wait_for((folder / "munge.socket").exists, "munged does not answer")
        self._daemon("slurmctld", "-D", "-c")
        self._daemon("slurmd", "-D", "-N", host)
        try:
            wait_for(lambda: "idle" in self._node(), "the node is not ready")
        except TimeoutError as error:
            raise TimeoutError(f"{error}{self.logs()}") from None

    def _node(self):
        with contextlib.suppress(AssertionError):
            return self.run("sinfo", "--noheader", "--format=%T")
        return ""

    def _daemon(self, name, *arguments):
        with (self._folder / f"{name}.out.log").open("w") as log:
            command = [shutil.which(name, path=PATH), *arguments]
            variables = os.environ | self.environment
            self._daemons.append(subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT, cwd=self._folder))


def wait_for(reached, otherwise, seconds=_SECONDS):
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.1)


def main():
    """Runs a Slurm until Ctrl-C or SIGTERM."""
    if missing := missing_commands():
        raise SystemExit(f"not installed: {', '.join(missing)}. Install them: apt-get install slurmctld slurmd munge")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Slurm(folder):
        print(f"export SLURM_CONF={folder}/slurm.conf", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
