"""When a launcher restarts a group, with how many processes and how soon; and how real groups end."""

import functools
import os
import shutil
import signal
import sys
import threading
import time

import pytest
from runs import Processes, rows

from jgt.document import InputError
from train.files.ends import Exit
from train.launch import __main__ as launch
from train.launch import group as devices
from train.launch import supervisor
from train.launch.group import End, Group
from train.launch.supervisor import Policy, supervise
from train.run.directory.folder import lock_folder


class Played:
    """A runner whose groups end as the test says: with this exit code of process 0, after a number of further steps."""

    def __init__(self, *ends, stopped_in=None):
        self._ends, self._stopped_in = list(ends), stopped_in
        self._step = 0
        self.starts, self.pauses, self.said = [], [], []
        self.is_stopped = False

    def run(self, processes, *, again):
        self.starts.append(processes)
        assert again == (len(self.starts) > 1)
        code, steps = self._ends.pop(0)
        self._step += steps
        return End(codes=(code, *[0] * (processes - 1)), first=None if code in (Exit.DONE, Exit.LOST) else 0)

    def newest_step(self):
        return self._step

    def pause(self, seconds):
        self.pauses.append(seconds)
        return len(self.pauses) != self._stopped_in

    def code(self, processes=1, restarts=3, min_processes=None):
        """The exit code of a launcher with this policy."""
        return supervise(Policy(processes=processes, restarts=restarts, min_processes=min_processes or processes), self, self.said.append)


def test_a_launcher_that_was_asked_to_stop_starts_nothing_again():
    played = Played((1, 2), (0, 2))
    played.is_stopped = True
    assert played.code() == 1
    assert played.starts == [1] and played.pauses == []


def test_a_run_that_is_done_is_not_started_again():
    played = Played((0, 9))
    assert played.code() == Exit.DONE
    assert played.starts == [1] and played.said == []


def test_a_run_that_is_done_but_has_lost_records_is_not_started_again():
    played = Played((Exit.LOST, 9))
    assert played.code(processes=2) == Exit.LOST
    assert played.starts == [2] and played.said == []


def test_a_failed_run_is_started_again():
    played = Played((1, 4), (0, 4))
    assert played.code() == Exit.DONE
    assert played.said == [
        "process 0 ended with exit code 1 (failed); the newest checkpoint is from step 4",
        "restarting on 1 process in 1 s (restart 1 of at most 3 without a newer checkpoint)",
    ]


def test_wrong_input_is_not_tried_again():
    played = Played((2, 0))
    assert played.code(processes=4, min_processes=1) == Exit.INPUT
    assert played.starts == [4]


def test_restarts_are_counted_in_a_row_without_progress():
    played = Played(*[(1, 5), (3, 0), (3, 0)] * 4, (1, 0))
    assert played.code(restarts=3) == Exit.FAILED
    assert len(played.starts) == 13
    assert (
        played.said[-1]
        == "not restarting: 3 in a row brought no newer checkpoint (--restarts 3). The same command resumes from the newest checkpoint"
    )


def test_without_restarts_there_is_none():
    played = Played((-9, 7))
    assert played.code(restarts=0) == 128 + 9
    assert played.said == [
        "process 0 ended with signal 9; the newest checkpoint is from step 7",
        "not restarting: --restarts is 0. The same command resumes from the newest checkpoint",
    ]


def test_delays_double_up_to_a_minute_and_begin_anew_with_progress():
    played = Played(*[(1, 0)] * 8, (1, 1), (1, 0), (0, 0))
    assert played.code(restarts=20) == Exit.DONE
    assert played.pauses == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2]


def test_thousands_of_restarts_are_possible():
    played = Played(*[(1, 0)] * 2000, (0, 0))
    assert played.code(restarts=10_000) == Exit.DONE
    assert played.pauses[-1] == 60


def test_after_a_loss_there_is_one_process_less_down_to_the_least():
    played = Played((-9, 1), (1, 0), (-9, 0), (-9, 0), (0, 1))
    assert played.code(processes=4, min_processes=2, restarts=4) == Exit.DONE
    assert played.starts == [4, 3, 3, 2, 2]


def test_after_a_start_with_fewer_processes_the_lost_one_gets_another_chance():
    played = Played((-9, 1), (-9, 1), (1, 1), (0, 1))
    assert played.code(processes=4, min_processes=2) == Exit.DONE
    assert played.starts == [4, 3, 4, 4]


@pytest.mark.parametrize("code", [1, -9])
def test_when_all_together_bring_nothing_the_number_that_did_is_used_again(code):
    played = Played((-9, 1), (-9, 1), (code, 0), (1, 1), (0, 1))
    assert played.code(processes=4, min_processes=2) == Exit.DONE
    assert played.starts == [4, 3, 4, 2, 4]


def test_without_a_least_number_all_are_started_again():
    played = Played((-9, 1), (0, 1))
    assert played.code(processes=4) == Exit.DONE
    assert played.starts == [4, 4]


def test_a_number_that_does_not_fit_the_mesh_is_passed_over():
    played = Played((-9, 1), (2, 0), (0, 1))
    assert played.code(processes=4, min_processes=2) == Exit.DONE
    assert played.starts == [4, 3, 2]


def test_when_the_least_number_does_not_fit_the_input_is_wrong():
    played = Played((-9, 1), (2, 0), (2, 0))
    assert played.code(processes=4, min_processes=2) == Exit.INPUT
    assert played.starts == [4, 3, 2]


def test_a_stop_during_the_pause_ends_with_the_code_of_the_failure():
    played = Played((1, 0), (-15, 0), stopped_in=2)
    assert played.code() == 128 + 15
    assert played.starts == [1, 1]


@pytest.mark.parametrize(
    ("codes", "first", "code"), [((0, 0), None, 0), ((5, 0), None, 5), ((0, -9), 1, 137), ((4, 3), 1, 3), ((-15, 0), 0, 143)]
)
def test_a_group_ends_with_the_code_of_its_first_failure(codes, first, code):
    assert End(codes=codes, first=first).code == code


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "a", "--resume", "never", "x=1"], ["--config", "a", "x=1"]),
        (["--config", "a", "--resume=never"], ["--config", "a"]),
        (["--resume", "auto", "--config", "never"], ["--resume", "auto", "--config", "never"]),
        (["--resume", "never/ever", "a=--resume"], ["--resume", "never/ever", "a=--resume"]),
        (["--resume", "never", "--resume", "never"], []),
        ([], []),
    ],
)
def test_a_restart_does_not_begin_again(arguments, expected):
    assert supervisor._without_never(arguments) == expected


class NeverStarted:
    def __init__(self, *_):
        raise AssertionError("a process was started")


@pytest.fixture
def refused(monkeypatch, capsys, tiny_file, tmp_path):
    """The messages of a launcher that refuses to start."""
    monkeypatch.setattr(supervisor, "Group", NeverStarted)

    def _refused(*own, arguments=()):
        argv = [*own, "--", "--config", str(tiny_file), f"run.dir={tmp_path / 'run'}", *arguments]
        assert launch.main(argv) == Exit.INPUT
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err.splitlines()

    return _refused


@pytest.mark.parametrize(
    ("own", "arguments", "expected"),
    [
        ((), ("train.stepz=3",), "command line: train.stepz=3: "),
        ((), ("--process", "0"), "command line: --process: must not be given, because the launcher numbers the processes"),
        (("--min-processes", "3"), (), "command line: --min-processes: is 3, more than --processes 2"),
        (
            ("--min-processes", "1"),
            (
                "sync={axis: data, every: 4}",
                "checkpoint.every=6",
                "mesh={data: -1}",
                "rules={axes: {batch: [data]}, inputs: {'*': [batch]}}",
            ),
            "checkpoint.every: 6 is not a multiple of sync.every 4, and fewer processes (--min-processes) can only continue from an "
            "exchange. Save every 8 steps, or leave out --min-processes",
        ),
        (
            ("--min-processes", "1"),
            (
                "sync={axis: data, every: 4, fragments: 2}",
                "checkpoint.every=8",
                "mesh={data: -1}",
                "rules={axes: {batch: [data]}, inputs: {'*': [batch]}}",
            ),
            "sync.fragments: 2 fragments are never exchanged all at once, and fewer processes (--min-processes) can only continue from "
            "such an exchange. Use 1, or leave out --min-processes",
        ),
        ((), ("--resume", "no/where"), "command line: --resume: no/where: is not a folder."),
        ((), ("devices.virtual_cpu=2", "mesh={data: 2}", "rules={default: replicate}"), "mesh: "),
    ],
)
def test_wrong_input_is_told_once_and_nothing_is_started(refused, own, arguments, expected):
    (line,) = refused("--processes", "2", *own, arguments=arguments)
    assert expected in line


def test_gpus_that_cannot_be_shared_are_wrong_input(refused, monkeypatch):
    monkeypatch.setattr(devices, "_gpus", lambda environment: ["0", "1", "2"])
    assert refused("--processes", "2") == ["command line: --processes: 2 processes cannot share 3 GPUs equally. These can: 1, 3"]


def test_flags_are_written_out_so_that_a_restart_finds_them(capsys, tiny_file):
    with pytest.raises(SystemExit) as left:
        launch.main(["--processes", "2", "--", "--config", str(tiny_file), "--resum", "never"])
    assert left.value.code == Exit.INPUT
    assert "--resum: unknown flag. Did you mean '--resume'?" in capsys.readouterr().err


def test_flags_of_the_launcher_stand_before_the_dashes(capsys):
    with pytest.raises(SystemExit) as left:
        launch.main(["--processes", "2", "--config", "a.yaml"])
    assert left.value.code == Exit.INPUT
    assert "--config: unknown flag." in capsys.readouterr().err


def visible(count, **options):
    return [environment.get("CUDA_VISIBLE_DEVICES") for environment in devices.environments(count, **options)]


def test_gpus_are_shared_equally(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible(2, virtual=False) == ["4,5", "6,7"]
    assert visible(4, virtual=False) == ["4", "5", "6", "7"]
    assert visible(1, virtual=False) == ["4,5,6,7"]
    assert visible(3, virtual=True) == ["4,5,6,7"] * 3
    with pytest.raises(InputError, match=r"3 processes cannot share 4 GPUs equally\. These can: 1, 2, 4"):
        visible(3, virtual=False)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_none_to_share(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert visible(2, virtual=False) == [hidden, hidden]


# -- real processes, which stand for Python ----------------------------------------------------------------------------

SCRIPT = """#!/bin/sh
ulimit -c 0
for last; do :; done
echo "process $last: $*"
{body}
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Makes the processes of groups run this shell script, in which $last is the number of the process."""
    # After a fork of a process with threads Python may do nothing.
    monkeypatch.setattr("train.launch.group._end_with", lambda parent: None)

    def _python(body):
        script = tmp_path / "python"
        script.write_text(SCRIPT.format(body=body))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return _python


@pytest.fixture
def group(python, tmp_path):
    """A group of processes that run this shell script."""
    started = []

    def _group(body, count=3):
        python(body)
        started.append(Group(["--config", "a.yaml"], [{**os.environ, "NUMBER": str(i)} for i in range(count)], tmp_path / "logs"))
        return started[-1]

    yield _group
    for one in started:
        one.send(signal.SIGKILL)
        one.wait(0)


def until_ready(folder, processes):
    """Waits until each of these processes has made the file python.NUMBER."""
    for process in range(processes):
        for _ in range(1000):
            if (folder / f"python.{process}").exists():
                break
            time.sleep(0.01)
        else:
            raise AssertionError(f"process {process} has not started")


def test_a_group_that_ends_well(group, tmp_path, capfd):
    assert group("test $last = $NUMBER").wait(5) == End(codes=(0, 0, 0), first=None)
    out = capfd.readouterr().out
    log = (tmp_path / "logs" / "process-2.log").read_text()
    assert out.startswith("process 0: -m jgt train --config a.yaml --coordinator localhost:")
    assert out.endswith(" --processes 3 --process 0\n") and log.endswith(" --processes 3 --process 2\n")
    assert out.split()[7] == log.split()[7]


def test_a_process_that_lost_records_ends_well_and_the_others_have_their_time(group):
    assert group("test $last = 2 && exit 6; sleep 0.5").wait(0.1) == End(codes=(0, 0, 6), first=None)


def test_a_process_alone_has_nobody_to_find(group, capfd):
    assert group("true", count=1).wait(5).code == 0
    assert capfd.readouterr().out == "process a.yaml: -m jgt train --config a.yaml\n"


def test_the_first_failure_ends_all_others_after_the_grace(group):
    begun = time.monotonic()
    end = group("test $last = 1 && exit 3; exec sleep 60").wait(0.3)
    assert end == End(codes=(-signal.SIGABRT, 3, -signal.SIGABRT), first=1)
    assert end.code == 3
    assert 0.3 < time.monotonic() - begun < 5


def test_within_the_grace_others_end_by_themselves(group):
    assert group("test $last = 2 && exit 1; sleep 0.3; exit 4").wait(20) == End(codes=(4, 4, 1), first=2)


def test_who_does_not_end_with_its_stacks_is_killed(group, monkeypatch):
    monkeypatch.setattr("train.launch.group._STACKS_SECONDS", 0.2)
    end = group("test $last = 1 && exit 3; trap '' ABRT; while :; do sleep 0.05; done", count=2).wait(0)
    assert end == End(codes=(-signal.SIGKILL, 3), first=1)


def test_a_suspended_process_is_killed_too(group, tmp_path):
    end = group("test $last = 0 && { sleep 0.3; exit 3; }; kill -STOP $$; sleep 60", count=2).wait(0)
    assert end.codes == (3, -signal.SIGABRT)


def test_signals_reach_all(group, tmp_path):
    one = group("trap 'exit 7' TERM; touch $0.$last; while :; do sleep 0.05; done")
    until_ready(tmp_path, 3)
    one.send(signal.SIGTERM)
    assert one.wait(5).codes == (7, 7, 7)


def test_a_signal_while_a_group_starts_reaches_it(tiny, monkeypatch):
    class Starting:
        def __init__(self, *_):
            self.sent = []
            groups.append(self)
            if len(groups) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def wait(self, grace_seconds):
            return End(codes=(1,), first=0)

        def send(self, number):
            self.sent.append(number)

    groups = []
    monkeypatch.setattr(supervisor, "Group", Starting)
    with supervisor.Launcher([], tiny(), grace_seconds=5) as launcher:
        launcher.run(1, again=False)
        launcher.run(1, again=True)
        assert not launcher.pause(10)
    assert [group.sent for group in groups] == [[], [signal.SIGTERM]]


def test_the_launcher_passes_signals_on_and_does_not_start_again(python, tiny, tmp_path):
    python("trap 'exit 7' TERM; touch $0.$last; while :; do sleep 0.05; done")
    before = signal.getsignal(signal.SIGTERM)
    run = tiny("devices.virtual_cpu=1")

    def send():
        until_ready(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    with supervisor.Launcher(["--config", "a.yaml"], run, grace_seconds=5) as launcher:
        sender.start()
        code = supervise(Policy(processes=2, restarts=3, min_processes=2), launcher, print)
        sender.join()
    assert code == 7
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_last_lines_of_a_process_that_fails_are_shown(python, tiny, tmp_path, capfd):
    python("test $last = 1 && { seq 1 30; exit 1; }; sleep 0.3")
    with supervisor.Launcher(["--config", "a.yaml"], tiny("devices.virtual_cpu=1"), grace_seconds=5) as launcher:
        assert launcher.run(2, again=False) == End(codes=(0, 1), first=1)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"--- the end of {tmp_path}/run/logs/process-1.log", *map(str, range(11, 31)), "---"]


@pytest.fixture
def ended(python, tiny, capfd):
    """The exit code of a launcher that restarts its two processes once, its lines, and their output on the terminal."""

    def _ended(body):
        python(body)
        with supervisor.Launcher(["--config", "a.yaml"], tiny("devices.virtual_cpu=1"), grace_seconds=5) as launcher:
            code = supervise(Policy(processes=2, restarts=1, min_processes=2), launcher, supervisor.report)
        out, err = capfd.readouterr()
        return code, err.splitlines(), out

    return _ended


FAILS = "test $last = 1 && { echo why; exit 3; }; sleep 0.2"


@pytest.mark.parametrize("harm", ["rm {log}", "rm {log}; mkdir {log}", "rm {log}; mkfifo {log}"])
def test_a_log_that_is_gone_costs_no_restart(ended, tmp_path, harm):
    log = tmp_path / "run" / "logs" / "process-1.log"
    code, lines, out = ended(f"test $last = 1 && {{ {harm.format(log=log)}; exit 3; }}; sleep 0.2")
    assert code == 3 and out.count("process 0: ") == 2
    assert any(line.startswith("jgt launch: restarting on 2 processes") for line in lines)
    assert any(str(log) in line and ("No such file" in line or "not a regular file" in line) for line in lines)


def test_a_closed_terminal_costs_no_restart(ended, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", closed)
        code, _, out = ended(FAILS)
    assert code == 3 and out.count("process 0: ") == 2


def test_only_the_end_of_a_log_is_read(ended, monkeypatch):
    code, lines, _ = ended("test $last = 1 && { seq 1 300000 | tr '\\n' ' '; exit 3; }; sleep 0.2")
    assert code == 3 and sum(map(len, lines)) < 3 * supervisor._LAST_BYTES


@pytest.mark.parametrize("place", ["link outside", "folder"])
def test_a_log_that_cannot_be_opened_costs_no_start(ended, tmp_path, place):
    log, victim = tmp_path / "run" / "logs" / "process-1.log", tmp_path / "victim"
    log.parent.mkdir(parents=True)
    victim.touch()
    log.mkdir() if place == "folder" else log.symlink_to(victim)
    code, lines, out = ended(FAILS)
    assert code == 3 and victim.read_text() == ""
    assert sum(line.startswith(f"jgt launch: {log}: ") for line in lines) == 2
    assert out.count("why") == 2


def test_processes_that_cannot_be_started_are_tried_again(ended, monkeypatch):
    monkeypatch.setattr(devices, "free_port", lambda: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    code, lines, _ = ended("true")
    assert code == Exit.FAILED
    assert sum("the processes cannot be started: " in line and "Too many open files" in line for line in lines) == 2


def test_a_launcher_of_a_run_in_use_starts_nothing(monkeypatch, capsys, tiny_file, tmp_path):
    monkeypatch.setattr(supervisor, "Group", NeverStarted)
    monkeypatch.setattr(supervisor, "lock_folder", functools.partial(lock_folder, seconds=0))
    with lock_folder(tmp_path / "run"):
        assert launch.main(["--processes", "2", "--", "--config", str(tiny_file), f"run.dir={tmp_path / 'run'}"]) == Exit.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jgt launch: another run is using {tmp_path / 'run'}. ")


# -- a run that is to begin again ------------------------------------------------------------------------------------


def test_never_stays_until_the_earlier_run_is_away(python, tiny, tmp_path, capfd):
    folder, run = tmp_path / "run", tiny("devices.virtual_cpu=1")
    (folder / "checkpoints" / "4").mkdir(parents=True)
    (folder / "config.yaml").touch()
    python("exit 1")
    said = lambda: capfd.readouterr().out.partition(": ")[2].strip()  # noqa: E731
    with supervisor.Launcher(["--config", "a.yaml", "--resume", "never"], run, grace_seconds=5) as launcher:
        for again in (False, True, True):
            launcher.run(1, again=again)
            assert said() == "-m jgt train --config a.yaml --resume never"
            assert launcher.newest_step() == 0
        # A start that was killed between two of its moves has moved a part.
        (tmp_path / "run.1").mkdir()
        (folder / "config.yaml").rename(tmp_path / "run.1" / "config.yaml")
        launcher.run(1, again=True)
        assert said().endswith("--resume never")
        (folder / "checkpoints").rename(tmp_path / "run.1" / "checkpoints")
        (folder / "config.yaml").touch()
        (folder / "checkpoints" / "2").mkdir(parents=True)
        launcher.run(1, again=True)
        assert said() == "-m jgt train --config a.yaml"


def test_each_group_has_a_token_of_its_own(python, tiny, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("JGT_TOKEN", "mine")
    python('echo "$JGT_TOKEN $JGT_LAUNCHED"')
    with supervisor.Launcher(["--config", "a.yaml"], tiny("devices.virtual_cpu=1"), grace_seconds=5) as launcher:
        for _ in range(2):
            launcher.run(2, again=False)
    tokens = [line.split() for line in capfd.readouterr().out.splitlines() if not line.startswith("process")]
    others = [line.split() for line in (tmp_path / "run/logs/process-1.log").read_text().splitlines() if not line.startswith("process")]
    assert tokens == others and all(launched == "1" and len(token) == 64 for token, launched in tokens)
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", "-1", "1000001", "ten", ""])
def test_a_grace_has_a_limit(capsys, number):
    with pytest.raises(SystemExit) as left:
        launch.main(["--processes", "1", f"--grace={number}", "--", "--config", "a.yaml"])
    assert left.value.code == Exit.INPUT
    assert f"command line: --grace: must be a number from 0 to 1,000,000, not '{number}'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--processes", "--restarts", "--min-processes"])
@pytest.mark.parametrize("number", ["-1", "1000000001", "9" * 5000, "\N{SUPERSCRIPT TWO}", "1.5"])
def test_numbers_have_limits(capsys, flag, number):
    with pytest.raises(SystemExit) as left:
        launch.main(["--processes", "1", f"{flag}={number}", "--", "--config", "a.yaml"])
    assert left.value.code == Exit.INPUT
    assert "must be a whole number from" in capsys.readouterr().err


def test_a_launcher_starts_a_limited_number_of_processes(refused):
    assert "command line: --processes: is 2,000. A launcher starts at most 1,024" in refused("--processes", "2000")


KILLED_ONCE = """
import os, pathlib, signal, sys
marker = pathlib.Path(__file__).with_name("killed")
if sys.orig_argv[1:4] == ["-m", "jgt", "train"] and not marker.exists():
    marker.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_that_begins_again_is_killed_before_it_has_moved_the_earlier_one_away(earlier, tiny_file, tmp_path, pytestconfig):
    shutil.copytree(earlier, tmp_path / "run")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(KILLED_ONCE)
    command = ["-m", "train.launch", "--processes", "1", "--", "--config", str(tiny_file), f"run.dir={tmp_path / 'run'}", "train.steps=6"]
    path = {"PYTHONPATH": f"{tmp_path / 'path'}:{pytestconfig.rootpath}"}
    with Processes(tmp_path, [[*command, "--resume", "never"]], pytestconfig.rootpath, path) as processes:
        assert processes.wait(0) == Exit.DONE
        assert "process 0 ended with signal 9" in processes.output(0)
        assert "restarting on 1 process" in processes.output(0)
        assert f"The earlier run was moved to {tmp_path / 'run.1'}" in processes.output(0)
        assert "Resumed" not in processes.output(0) and "Already" not in processes.output(0)
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_run_goes_on_when_the_one_it_came_from_is_gone(earlier, nursery, tiny_file, tmp_path, pytestconfig):
    shutil.copytree(earlier, tmp_path / "origin")
    for steps in (8, 10):
        command = ["--config", str(tiny_file), f"run.dir={tmp_path / 'run'}", f"train.steps={steps}", "--resume", str(tmp_path / "origin")]
        with Processes(tmp_path, [command], pytestconfig.rootpath, nursery=nursery) as processes:
            assert processes.wait(0) == Exit.DONE
            expected = f"Continues from {tmp_path / 'origin' / 'checkpoints' / '6'}, at step 6" if steps == 8 else "Resumed from step 8 in "
            assert expected in processes.output(0)
        shutil.rmtree(tmp_path / "origin", ignore_errors=True)
