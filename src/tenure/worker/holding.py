"""A lease in our hands: the one mutable record of an attempt that loop and keeper share.

Two threads touch it. The keeper's writes `lease`, `until`, `lost` and `kept`, the worker's loop all
the rest; every write is one attribute, so nobody needs a lock. `until` is the local deadline: the
moment, on our own clock, at which the store may have given the job to somebody else. It counts
from when the last confirmed claim or extend was sent, never from when its answer came.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from tenure.core.lease import Lease
from tenure.core.outcome import Outcome
from tenure.worker.metrics import Tally
from tenure.worker.task import Task

Ending = Literal["", "lost", "cancel", "timeout", "shutdown"]
"""Why an attempt was ended from outside: its lease was lost, somebody asked for it, it took too
long, the worker stops. From then on what its handler returns or raises does not count."""


class Held(msgspec.Struct, eq=False):
    """One lease, from claim to verdict. `begun`: its handler was really started. `concluded`: its
    outcome is chosen, once and for all.

    `freed`: its slot is free again, which for a thread that cannot be stopped is later. `kept` off
    tells the keeper to let it run out. `unsent` counts reports that are not yet written: the
    outcome waits for them in `parked`.
    """

    lease: Lease
    until: float
    started: float
    lost: bool = False
    kept: bool = True
    ended: Ending = ""
    begun: bool = False
    concluded: bool = False
    freed: bool = False
    asked_to_cancel: bool = False
    ran_s: float = 0.0
    unsent: int = 0
    runner: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    parked: Any = None
    outcome: Outcome | None = None

    def end_timer(self) -> None:
        """Drop the pending timeout or grace period, if there is one."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Attempt(msgspec.Struct, frozen=True, eq=False):
    """One execution of one lease; `task` is None when nobody here can run it.

    `source` and `job` come from `worker.source` and `worker.job`, which import this module.
    """

    held: Held
    task: Task | None
    source: Any
    job: Any
    tally: Tally
