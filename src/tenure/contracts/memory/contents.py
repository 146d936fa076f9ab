"""Everything one memory queue holds, and the four ways in which a job leaves a state.

Who may do what is decided elsewhere (`store`, `submitting`, `settling`, `steering`); here are the
steps themselves, each of them one journal event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from tenure.contracts.memory.history import History
from tenure.contracts.memory.line import Line
from tenure.contracts.memory.options import MemoryOptions
from tenure.contracts.memory.stored import StoredJob


class Contents:
    """Jobs, idempotency keys, the line and the history of one queue name.

    `depth` counts what is not finished, `workers` says when each last asked for work, `slots` how
    many jobs it runs at once, if it told.
    """

    def __init__(
        self, name: str, options: MemoryOptions, now_ms: Callable[[], int], random: Random
    ) -> None:
        self.name = name
        self.options = options
        self.now_ms = now_ms
        self.random = random
        self.jobs: dict[str, StoredJob] = {}
        self.keys: dict[str, str] = {}
        self.line = Line(self.jobs)
        self.history = History(now_ms)
        self.paused = False
        self.depth = 0
        self.workers: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        self._finished: deque[tuple[int, int, str]] = deque()

    def enter(self, job: StoredJob) -> None:
        """A new job: known by its id and key, with its first event."""
        self.jobs[job.job_id] = job
        if job.key:
            self.keys[job.key] = job.job_id
        if job.ttl_ms:
            self.line.watch(job)
        self.depth += 1
        self.history.opened(job)

    def put_back(self, job: StoredJob, kind: str, **left: Any) -> None:
        """Close the lease of a running job, which waits again; its turn is the caller's choice."""
        over: dict[str, Any] = {"token": "", "worker_id": "", "lease_until_ms": 0, "due_ms": 0}
        self.history.step(job, kind, "waiting", **(over | left))

    def finish(self, job: StoredJob, kind: str, state: str, **left: Any) -> None:
        """End a job for good, whether it was leased or waiting."""
        over: dict[str, Any] = {
            "token": "",
            "lease_until_ms": 0,
            "due_ms": 0,
            "cancel_requested": False,
        }
        self.history.step(job, kind, state, **(over | left))
        self.depth -= 1
        self._finished.append((job.updated_ms, job.ver, job.job_id))

    def bury(self, job: StoredJob, code: str, message: str, *, kind: str = "bury") -> None:
        """End a job as failed by the store's own decision, with a reason that the ledger shows."""
        error = msgspec.json.encode({"code": code, "message": message, "retryable": False})
        self.finish(job, kind, "failed", error=error, error_code=code)

    def remove(self, job: StoredJob, why: str) -> None:
        """Forget a job that nobody runs, and its idempotency key."""
        if job.state == "waiting":
            self.depth -= 1
        self.history.removed(job, why)
        del self.jobs[job.job_id]
        if job.key:
            self.keys.pop(job.key, None)

    def trim(self) -> int:
        """Remove what finished longer than `keep_ms` ago, and the oldest journal events."""
        before_ms, trimmed = self.now_ms() - self.options.keep_ms, 0
        while self._finished and self._finished[0][0] < before_ms:
            _, ver, job_id = self._finished.popleft()
            job = self.jobs.get(job_id)
            if job is not None and job.ver == ver:  # else it was reopened or removed since
                self.remove(job, "kept long enough")
                trimmed += 1
        return trimmed + self.history.trim(self.options.journal_events_max)
