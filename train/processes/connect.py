"""Starts JAX's devices on the processes of a run: finds the coordinator, joins the others there, and lets JAX connect them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
from jax._src.clusters import ClusterEnv

from jgt import use_virtual_cpu
from jgt.document import InputError, shown

from ..files.ends import Exit
from ..files.streams import say
from .cluster import Cluster
from .join import Address, Membership, join
from .processes import dump_stacks

MAX_VIRTUAL_CPU = 1_024
"""JAX's time to start virtual devices grows with their square: a second for 1,024, a quarter of an hour for 32 times as many."""
_SHUTDOWN_SECONDS = 60
_DETECTION_SECONDS = 60
_JOIN_MARGIN_SECONDS = 5.0
"""Within its time the join ends by itself, with a better message. This is for the calls that it cannot interrupt."""
_LOOPBACK = "127.0.0.1"


def start_jax(
    cluster: Cluster | None,
    virtual_cpu: int | None,
    heartbeat_seconds: int = 100,
    where: str = "run",
    member: Membership | None = None,
) -> None:
    """Gives JAX its devices and joins the other processes. Must be called before anything asks JAX for devices.

    virtual_cpu: number of virtual CPU devices, None for the machine's own devices. heartbeat_seconds: after this long without a sign of
    life JAX itself declares a process dead and aborts the others. where: file and line of `devices.virtual_cpu`. Raises InputError for
    more virtual devices than JAX starts in reasonable time, and what `train.processes.join.join` raises.
    """
    if virtual_cpu is not None:
        if virtual_cpu > MAX_VIRTUAL_CPU:
            most = f"A run starts at most {MAX_VIRTUAL_CPU:,}; jgt check and jgt plan accept any number"
            raise InputError([f"{where}: devices.virtual_cpu: {virtual_cpu:,} is too large. {most}"])
        use_virtual_cpu(virtual_cpu)
    if cluster is None:
        return
    member, begun = member or Membership(), time.monotonic()
    with _ends_after(member.seconds + _JOIN_MARGIN_SECONDS, "joining the other processes"):
        address, count, process, device_ids = _locate(cluster)
        place = _place(address)
        join(place, process, count, replace(member, facts={**member.facts, "--processes": count}))
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX's preemption service would install its own SIGTERM handler; signals belong to train.processes.watch.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            _joined(place.host, place.port),
            count,
            process,
            device_ids,
            # Even with an explicit address JAX looks for a cluster. Under Slurm it would then leave each process only one of its devices.
            cluster_detection_method="deactivate",
            # Longer than this process waits, because JAX ends it without saying which process is missing.
            initialization_timeout=int(max(0, member.seconds - (time.monotonic() - begun))) + 60,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            coordinator_bind_address=_joined(place.listen, place.port),
        )


@contextlib.contextmanager
def _ends_after(seconds: float, what: str) -> Iterator[None]:
    """Inside, ends this process with the stacks of its threads and `Exit.UNJOINED` if `what` takes longer.

    For calls that no thread can interrupt: the resolution of a host's name, JAX's own connection.
    """

    def end() -> None:
        say(f"{what} has taken more than {seconds:.0f} s. Stacks of all threads follow")
        dump_stacks(sys.stderr)
        # sys.exit would end only this thread.
        os._exit(Exit.UNJOINED)

    timer = threading.Timer(seconds, end)
    # A regular exit does not wait for it.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _locate(cluster: Cluster) -> tuple[str, int, int, Sequence[int] | None]:
    """The coordinator's address, the number of processes, this process's number, and its devices (None for all), from flags or JAX."""
    if cluster.coordinator is not None and cluster.num_processes is not None and cluster.process is not None:
        return cluster.coordinator, cluster.num_processes, cluster.process, None
    given, remedy = os.environ.get("JAX_COORDINATOR_ADDRESS"), "Give --coordinator, --processes and --process"
    try:
        address, count, process, devices = ClusterEnv.auto_detect_unset_distributed_params(
            given, None, None, None, None, _DETECTION_SECONDS
        )
    except (ValueError, LookupError) as error:
        raise InputError([f"environment: JAX cannot read the variables of this cluster: {error}. {remedy}"]) from None
    if address is None or count is None or process is None:
        raise InputError([f"environment: JAX does not find the other processes. {remedy}"])
    # JAX reads this variable itself, if it is given no devices.
    return address, count, process, None if "JAX_LOCAL_DEVICE_IDS" in os.environ else devices


def _place(address: str) -> Address:
    host, port = _split(address)
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    # A run on one machine needs no other: by default JAX would listen at all addresses of the machine.
    is_local = host in ("localhost", _LOOPBACK)
    listen = (bind and _split(bind)[0]) or (_LOOPBACK if is_local else "::")
    return Address(host=_LOOPBACK if is_local else host, port=port, listen=listen)


def _split(address: str) -> tuple[str, int]:
    """The host and the port of an address. Raises InputError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        # As the resolver of names does.
        host.encode("idna")
        return host, int(port)
    except ValueError:
        raise InputError([f"the coordinator's address {shown(address)} is not HOST:PORT, as in 10.0.0.1:8476"]) from None


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
