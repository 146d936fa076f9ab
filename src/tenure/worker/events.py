"""Who hears what of a worker: tests and its own parts (`Watch`), the application (`Listeners`),
systemd (`Notifier`)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, get_args

import structlog

from tenure.core.encoding import from_json
from tenure.core.errors import UsageError
from tenure.core.outcome import Buried, Cancelled, Completed, Retried, Verdict
from tenure.worker.job import Attempt

log = structlog.get_logger("tenure.worker")

Hook = Callable[[str, int], None]

_ACTIVITY = ("claimed", "settled", "lost")


class Watch:
    """Counts events by name, so that tests wait for one instead of sleeping; not thread-safe.

    The names: contact, ready, claimed, claim_failed, dry, started, ended, abandoned, reported,
    report_failed, settled, settle_failed, extended, extend_failed, lost, upkeep, draining,
    releasing, drained, stopped. `activity` is a number that grows whenever jobs come or go.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.hooks: list[Hook] = []
        self.activity = 0
        self._active = asyncio.Event()
        self._waiters: list[tuple[str, int, asyncio.Future[None]]] = []

    def tell(self, name: str, count: int = 1) -> None:
        """Something happened `count` times."""
        self.counts[name] += count
        if name in _ACTIVITY:
            self.activity += count
            self._active.set()
        if self._waiters:
            self._wake(name)
        for hook in self.hooks:
            hook(name, count)

    async def next_activity(self, *, timeout_s: float) -> None:
        """Return when jobs come or go, or after a while."""
        self._active.clear()
        alarm = asyncio.get_running_loop().call_later(timeout_s, self._active.set)
        try:
            await self._active.wait()
        finally:
            alarm.cancel()

    async def until(self, name: str, count: int = 1, *, timeout_s: float = 10) -> None:
        """Return as soon as `name` has happened `count` times since the worker was made."""
        if self.counts[name] >= count:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((name, count, waiter))
        try:
            await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            seen = dict(self.counts)
            raise TimeoutError(f"no {count} x {name!r} within {timeout_s} s; {seen=}") from None

    def _wake(self, name: str) -> None:
        seen = self.counts[name]
        for waited, count, waiter in self._waiters:
            if waited == name and seen >= count and not waiter.done():
                waiter.set_result(None)
        self._waiters = [entry for entry in self._waiters if not entry[2].done()]


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
        outcome = attempt.outcome
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


class Notifier:
    """Tells systemd how we are, by datagrams to the socket that `NOTIFY_SOCKET` names.

    `@` begins an abstract name. Without a name nothing is sent.
    """

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def send(self, state: str) -> None:
        """A manager that does not listen must not hurt the worker, so failures are ignored."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(state.encode(), self._address)

    def ready(self, status: str) -> None:
        """Every store has answered once."""
        self.send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """No more claims; what runs is being finished."""
        self.send("STOPPING=1\nSTATUS=draining")

    def watchdog(self) -> None:
        """Loop and keeper are alive."""
        self.send("WATCHDOG=1")

    async def feed_watchdog(self, watchdog_ms: int) -> None:
        """Feed the watchdog twice in `watchdog_ms` while the event loop runs; 0: there is none."""
        while watchdog_ms:
            self.watchdog()
            await asyncio.sleep(watchdog_ms / 2000)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
