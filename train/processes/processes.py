"""One run on several processes, which wait for each other and compare values.

The processes run the same program, and every collective needs all of them. If one process raises an error before a collective and the
others do not, the others wait for ever. Therefore no process acts alone on what only it can see (a missing file, a failed save): the
processes first exchange their findings, then all of them continue or all of them raise. `agree_on_input`, `agreed`,
`true_on_all_processes` and `number_of_first_process` are such exchanges. The invariant: all processes call them in the same order.

This is the only file that uses JAX's client of its coordination service.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TextIO, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from jgt.document import InputError

from ..files.streams import discard_unwritten

_ENDLESS_MS = 1_000_000_000
_EXIT_SECONDS = 3.0
_CLOCK_BARRIERS = 9
_Result = TypeVar("_Result")


class Store:
    """Short texts by name that all processes of the run can read and write.

    The key-value store of JAX's coordination service, which runs inside the first process and dies with it.
    """

    def __init__(self, client: Any):
        self._client = client

    def set(self, name: str, text: str) -> None:
        """Writes a text; replaces an earlier one of the same name."""
        self._client.key_value_set(f"jgt/{name}", text, allow_overwrite=True)

    def below(self, folder: str) -> dict[str, str]:
        """The texts whose names start with `folder/`, by the rest of their names."""
        prefix = f"jgt/{folder}/"
        return {name.removeprefix(prefix): text for name, text in self._client.key_value_dir_get(prefix)}


def dump_stacks(file: TextIO) -> None:
    """Writes the stacks of all threads to a file."""
    # stderr may not be a file, as in a test, or may be closed.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.dump_traceback(file, all_threads=True)


def shared_store() -> Store | None:
    """The store that the processes of this run share; None if the run has only one process."""
    client = distributed.global_state.client
    return None if client is None or number_of_processes() == 1 else Store(client)


def number_of_processes() -> int:
    """The number of processes of the run. Unlike jax.process_count, it opens no devices and waits for no other process."""
    return distributed.global_state.num_processes if distributed.global_state.client is not None else 1


def this_process() -> int:
    """The number of this process, from 0. Unlike jax.process_index, it opens no devices and waits for no other process."""
    return distributed.global_state.process_id if distributed.global_state.client is not None else 0


def exit_if_distributed(code: int) -> None:
    """Ends this process at once if it belongs to a run of several processes; returns otherwise."""
    discard_unwritten()
    if distributed.global_state.client is not None:
        # A regular exit runs JAX's shutdown, which waits for a barrier with processes that may be gone.
        os._exit(code)


def limit_exit(code: int) -> None:
    """Lets a regular exit with this code take only some seconds, unless this process waits for others.

    A regular exit first waits for all threads. Those that a library has started for a save may wait ten minutes after it has failed.
    """
    # A daemon, because the exit would wait for this thread too. The system may allow no further one.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_end_late, args=(code,), name="exit", daemon=True).start()


def _end_late(code: int) -> None:
    time.sleep(_EXIT_SECONDS)
    if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
        # JAX's shutdown follows the wait for the threads, and other processes may wait in their shutdown for it.
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()
        discard_unwritten()
        os._exit(code)


def agree_on_input(problems: Sequence[str], values: Mapping[str, object] = MappingProxyType({})) -> None:
    """Returns when no process has a problem and all processes have the same `values` (plain Python values, by what they are).

    Otherwise raises InputError on every process: with its own problems, or with the number of a process that has some, or with the number
    of a process whose values differ.
    """
    barrier("input")
    if jax.process_count() == 1:
        if problems:
            raise InputError(problems)
        return
    # A checksum stands for the values, because the exchange takes arrays of one shape on all processes.
    checksums = [zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode()) for value in values.values()]
    mine = np.array([len(problems), *checksums], np.uint32)
    # [process, 1 + values]. The exchange comes before any raise: a process that raised first would leave the others waiting in it.
    everyone = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, len(mine))
    if problems:
        raise InputError(problems)
    me = f"process {jax.process_index()}"
    if failed := np.flatnonzero(everyone[:, 0]).tolist():
        raise InputError([f"{me}: stopped because of the problems that process {failed[0]} reports"])
    if len(other := np.argwhere(everyone != mine)):
        process, which = other[0].tolist()
        raise InputError([f"{me}: {[*values][which - 1]} differs from process {process}'s. Give all processes the same"])


def agreed(call: Callable[[], _Result], value: Callable[[_Result], object] = lambda _: None, what: str = "what it opens") -> _Result:
    """The result of a call. value: what of it is the same on all processes. what: its name, for the message.

    Raises InputError, on all processes, if the call fails on one of them or has another value there.
    """
    problems: list[str] = []
    result: Any = None
    with InputError.collect(problems):
        result = call()
    agree_on_input(problems, {what: None if problems else value(result)})
    return result


def true_on_all_processes(mine: bool) -> bool:
    """Whether every process passes True."""
    return mine if jax.process_count() == 1 else bool(np.asarray(multihost_utils.process_allgather(np.array([mine]))).all())


def number_of_first_process(mine: int) -> int:
    """The number that the first process passes, on every process."""
    return mine if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int64(mine)))


def failure_of_any(name: str, mine: str | None, seconds: float) -> str | None:
    """Waits until all processes have called it with this name, which a run uses once, and returns why one of them has failed.

    mine: why this one has; None if it has not. Without all processes it returns a failure after `seconds`. It needs no device, so any
    thread may call it while the training goes on.
    """
    client = distributed.global_state.client
    if client is None or number_of_processes() == 1:
        return mine
    store, process = Store(client), this_process()
    try:
        if mine is not None:
            store.set(f"failures/{name}/{process}", mine)
        client.wait_at_barrier(f"jgt/failures/{name}", timeout_in_ms=int(1000 * seconds))
        failures = store.below(f"failures/{name}")
    except RuntimeError as error:
        return mine or f"the other processes did not answer within {seconds:g} s ({next(iter(str(error).splitlines()), 'no reason')})"
    return mine or next((f"process {other}: {text}" for other, text in sorted(failures.items())), None)


def barrier(name: str) -> None:
    """Waits until all processes have called it with this name, which a run uses once.

    It waits in the coordination service and not in a collective. On CPUs, the first collective of some devices connects their processes
    with Gloo, which gives up after 30 seconds, and a process may need longer than another to read data or to compile. So wherever
    processes may come to such a collective at different times, they wait for each other here. The watch limits the wait.
    """
    client = distributed.global_state.client
    if client is not None and number_of_processes() > 1:
        client.wait_at_barrier(f"jgt/{name}", timeout_in_ms=_ENDLESS_MS)


def clock_ahead() -> float:
    """The seconds by which this process's clock is ahead of the first process's, to within some milliseconds. All processes call it once.

    All processes leave a barrier within the round trip of a message, so the moments at which they leave it are one moment on their clocks.
    """
    client = distributed.global_state.client
    if client is None or number_of_processes() == 1:
        return 0.0
    left, store = list[float](), Store(client)
    for number in range(_CLOCK_BARRIERS):
        barrier(f"clock {number}")
        left.append(time.time())
    if this_process() == 0:
        store.set("clock/0", json.dumps(left))
    barrier("clock")
    first = json.loads(store.below("clock")["0"])
    # A process that was not running at one of these moments leaves that barrier late.
    return statistics.median(mine - theirs for mine, theirs in zip(left, first, strict=True))
