"""The settings of a worker, its capacity and its id."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from tenure.core.lease import WorkerId

CONCURRENCY_DEFAULT = 100
THREADS_DEFAULT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a worker; the defaults suit jobs of milliseconds to hours.

    `concurrency`, `threads` and `processes` left at None follow the kinds of handlers there are,
    see `capacity`. `keeper_threaded` off runs the keeper in the worker's own loop and starts no
    thread at all, which is what a simulation with virtual time needs; a handler that blocks the
    loop may then lose its lease. `unknown_task_ms` is how long a job without a handler here is
    handed back before it fails. `debug` logs every job.
    """

    worker_id: str = ""
    concurrency: int | None = None
    threads: int | None = None
    processes: int | None = None
    claim_wait_ms: int = 500
    claim_batch_max: int = 500
    settle_batch_max: int = 500
    settle_tries_max: int = 8
    keeper_threaded: bool = True
    keeper_ms_max: int = 1_000
    upkeep_ms: int = 1_000
    backoff_ms: int = 50
    backoff_ms_max: int = 2_000
    cancel_grace_ms: int = 5_000
    unknown_task_ms: int = 3_600_000
    drain_ms: int = 30_000
    flush_ms: int = 5_000
    burst: bool = False
    tracing: bool = False
    debug: bool = False
    uvloop: bool = True
    notify_socket: str = ""
    watchdog_ms: int = 0

    def __post_init__(self) -> None:
        for name in ("concurrency", "threads", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1 (or None for the default), not {value}")
        for name in ("claim_batch_max", "settle_batch_max", "settle_tries_max", "keeper_ms_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many jobs run at once, and how many of them in threads and in child processes."""

    slots: int
    threads: int
    processes: int


def capacity(settings: Settings, kinds: set[str]) -> Capacity:
    """The capacity by the settings, with defaults by the kinds of the registered handlers.

    A worker with only thread handlers runs no more jobs than it has threads, one with only process
    handlers no more than it has cores. With mixed kinds, the kind of a job is not known before the
    claim; jobs beyond a pool's size wait for it while their leases are extended.
    """
    cores = os.cpu_count() or 1
    threads = settings.threads or settings.concurrency or THREADS_DEFAULT
    processes = settings.processes or min(settings.concurrency or cores, cores)
    if settings.concurrency is not None:
        slots = settings.concurrency
    elif "async" in kinds or not kinds:
        slots = CONCURRENCY_DEFAULT
    else:
        slots = ("thread" in kinds) * threads + ("process" in kinds) * processes
    return Capacity(slots, threads, processes)


def identity(environ: Mapping[str, str] | None = None, *, boot: str = "") -> WorkerId:
    """`POD_NAME`, else `HOSTNAME`, else the host's own name, joined with the boot id.

    >>> identity({"POD_NAME": "render-0", "HOSTNAME": "node7"}, boot="5d1c")
    'render-0-5d1c'
    >>> identity({"HOSTNAME": "node7"}).name, identity({}, boot="5d1c").name
    ('node7', '5d1c')
    """
    known = environ or {}
    name = known.get("POD_NAME") or known.get("HOSTNAME") or ""
    boot_uuid = uuid.uuid4()
    unique = f"{name or socket.gethostname()}-{boot or boot_uuid.hex[:12]}"
    return WorkerId(unique, name or boot or str(boot_uuid))
