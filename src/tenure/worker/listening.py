"""What an application hears of its worker: `worker.on("completed", listener)`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

import structlog

from tenure.core.errors import UsageError
from tenure.core.outcome import Buried, Cancelled, Completed, Retried, Verdict
from tenure.core.values import from_json
from tenure.worker.holding import Attempt

log = structlog.get_logger("tenure.worker")

EventName = Literal[
    "ready", "active", "completed", "failed", "cancelled", "drained", "paused", "resumed", "closed"
]
"""active(job): its handler starts. completed(job, result) and failed(job, failure): the store has
taken the outcome of the attempt; a failed one may be tried again. cancelled(job). drained(): claims
find nothing any more. ready(), paused(), resumed(), closed(): the worker."""

Listener = Callable[..., Any]


class Listeners:
    """Functions by the event they want to hear of; called in the worker's loop."""

    def __init__(self) -> None:
        self._by_event: dict[str, list[Listener]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def __bool__(self) -> bool:
        return bool(self._by_event)

    def add(self, event: EventName, listener: Listener) -> None:
        """Call `listener` with what belongs to the event; one that raises is logged."""
        if event not in get_args(EventName):
            raise UsageError(f"a worker has no event {event!r}; {', '.join(get_args(EventName))}")
        self._by_event.setdefault(event, []).append(listener)

    def tell(self, event: EventName, *what: Any) -> None:
        """It happened."""
        for listener in self._by_event.get(event, ()):
            try:
                answer = listener(*what)
            except Exception:
                log.exception("a listener failed", worker_event=event)
                continue
            if inspect.isawaitable(answer):
                task = asyncio.ensure_future(answer)
                self._tasks.add(task)
                task.add_done_callback(self._done)

    def ended(self, attempt: Attempt, verdict: Verdict) -> None:
        """The store answered the outcome of an attempt."""
        outcome = attempt.held.outcome
        if outcome is None or attempt.job is None:
            return
        if isinstance(verdict, Completed):
            if "completed" in self._by_event:
                self.tell("completed", attempt.job, from_json(outcome.result))
        elif isinstance(verdict, Cancelled):
            self.tell("cancelled", attempt.job)
        elif isinstance(verdict, Retried | Buried) and outcome.failure is not None:
            self.tell("failed", attempt.job, outcome.failure)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a listener failed", exc_info=error)
