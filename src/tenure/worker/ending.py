"""How an attempt is ended from outside, by its timeout, a lost lease, a cancel request or shutdown.

An `async def` handler gets a `CancelledError`, a process is killed; a thread cannot be stopped and
is told by `job.cancelled`. Whoever has not stopped when the grace period is over is abandoned: its
outcome is settled without it, and it can hold up nobody. Only a thread keeps its slot until it
returns, because the thread is really occupied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tenure.worker.announcing import lease_facts
from tenure.worker.holding import Attempt, Ending
from tenure.worker.watching import Watch

log = structlog.get_logger("tenure.worker")


class Ender:
    """Ends attempts. `conclude` chooses the outcome of the ending, `free` gives the slot back."""

    def __init__(
        self,
        *,
        conclude: Callable[[Attempt], None],
        free: Callable[[Attempt], None],
        grace_ms: int,
        watch: Watch,
    ) -> None:
        self._conclude = conclude
        self._free = free
        self._grace_s = grace_ms / 1000
        self._watch = watch

    def arm(self, attempt: Attempt) -> None:
        """Let its timeout run from now."""
        held = attempt.held
        timeout_s = attempt.task.timeout_s if attempt.task else None
        if timeout_s is not None and not held.ended and held.timer is None:
            loop = asyncio.get_running_loop()
            held.timer = loop.call_later(timeout_s, self.end, attempt, "timeout")

    def end(self, attempt: Attempt, why: Ending) -> None:
        """Stop an attempt; a later reason changes nothing, unless the lease is lost."""
        held = attempt.held
        if held.concluded or (held.ended and why != "lost"):
            return
        was_stopping = held.ended != ""
        held.ended = why
        self._watch.tell("ended")
        if not held.begun:  # nothing to stop yet, and nothing will begin any more
            self._drop(attempt)
            return
        if why == "lost" or (why == "timeout" and _in_thread(attempt)):
            self._conclude(attempt)
        if not was_stopping:
            self._stop(attempt)

    def _stop(self, attempt: Attempt) -> None:
        held = attempt.held
        held.end_timer()
        held.timer = asyncio.get_running_loop().call_later(self._grace_s, self._abandon, attempt)
        if held.runner is not None and not _in_thread(attempt):
            held.runner.cancel()

    def _drop(self, attempt: Attempt) -> None:
        runner = attempt.held.runner
        self._conclude(attempt)
        self._free(attempt)
        if runner is not None:
            runner.cancel()

    def _abandon(self, attempt: Attempt) -> None:
        held = attempt.held
        held.timer = None
        if held.freed:
            return
        self._conclude(attempt)
        self._watch.tell("abandoned")
        in_thread = _in_thread(attempt)
        log.error(
            "a handler does not stop; abandoned",
            **lease_facts(held.lease),
            why=held.ended,
            slot="taken until its thread returns" if in_thread else "free",
        )
        if not in_thread:
            self._free(attempt)


def _in_thread(attempt: Attempt) -> bool:
    return attempt.task is not None and attempt.task.kind == "thread"
