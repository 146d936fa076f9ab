"""`consume`: run a handler for every job of a queue, in this event loop.

One claim takes as many jobs as there are free slots, one call keeps all leases, one call ends all
that finished since the last one. Upkeep goes on while handlers run. A handler that loses its lease
is cancelled (`ctx.lost` is set for one that runs in a thread), and nothing more is written for it.

It is the contract's helper for a program of its own. `tenure.Worker` serves the same queue with
more around it: processes, a keeper that a blocked event loop cannot starve, metrics, many queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from tenure.contracts.omniq.queue import OmniqQueue
from tenure.core.encoding import from_json
from tenure.core.errors import LeaseLost, StoreError
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome
from tenure.core.retry import judge
from tenure.core.seam import Quarantined

_CLAIM_WAIT_MS = 200
_UPKEEP_S = 1.0
_BEAT_S_MIN = 0.05
# How long leases are taken to be while there is none; also bounds how late a cancel is heard.
_LEASE_MS_IDLE = 3_000
_BACKLOG_FACTOR = 8
_LEAVE_S = 1.0


def warn(text: str, **facts: object) -> None:
    """Log a warning; structlog is loaded only when there is one."""
    import structlog

    structlog.get_logger("tenure.omniq").warning(text, **facts)


def warn_quarantined(queue: str, records: Iterable[Quarantined]) -> None:
    """One line for each record that was set aside."""
    for record in records:
        warn("record_quarantined", queue=queue, job_id=record.job_id, reason=record.reason)


class Exec:
    """`ctx.exec`: what a handler may do with the queues of its server, by OmniQ's names.

    A coroutine awaits each call. A plain handler, which runs in a thread, just calls it; `loop` is
    then the client's.
    """

    def __init__(
        self, client: Any, job_id: str, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._loop = loop

    def publish(self, queue: str, payload: dict[str, Any] | list[Any], **options: Any) -> Any:
        """Store a job, with the options of `Client.publish`; its id."""
        return self._do(self._client.publish(queue, payload, **options))

    def pause(self, queue: str) -> Any:
        """Hand out no more leases of a queue."""
        return self._do(self._client.pause(queue))

    def resume(self, queue: str) -> Any:
        """Hand out leases again."""
        return self._do(self._client.resume(queue))

    def is_paused(self, queue: str) -> Any:
        """Whether a queue is paused."""
        return self._do(self._client.is_paused(queue))

    def childs_init(self, key: str, expected: int) -> Any:
        """Begin to count children of a parent."""
        return self._do(self._client.childs_init(key, expected))

    def child_ack(self, key: str, child_id: str | None = None) -> Any:
        """This job, or the child named, is done; how many are left."""
        return self._do(self._client.child_ack(key, child_id or self._job_id))

    def _do(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            return call
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


class JobContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler is given. `lost` is set when the lease is gone: stop, nothing counts.

    `exec` publishes, pauses and counts children on the same server.
    """

    queue: str
    job_id: str
    payload_raw: str
    payload: Any
    attempt: int
    max_attempts: int
    lock_until_ms: int
    lease_token: str
    gid: str
    lost: threading.Event
    exec: Exec


Handler: TypeAlias = Callable[[JobContext], Awaitable[Any] | Any]


def context_of(lease: Lease, tools: Exec) -> JobContext:
    """The context of one attempt."""
    raw = lease.payload.decode(errors="replace")
    try:
        payload = from_json(lease.payload)
    except msgspec.DecodeError:
        payload = raw  # another client stored it so; the handler shall see what is there
    return JobContext(
        queue=lease.queue,
        job_id=lease.job_id,
        payload_raw=raw,
        payload=payload,
        attempt=lease.attempt,
        max_attempts=lease.max_attempts,
        lock_until_ms=lease.lease_until_ms,
        lease_token=lease.token,
        gid=lease.gid,
        lost=threading.Event(),
        exec=tools,
    )


async def consume(
    queue: OmniqQueue,
    handler: Handler,
    client: Any,
    *,
    concurrency: int = 1,
    drain: bool = True,
    signals: bool = True,
    stop: asyncio.Event | None = None,
    beat_s: float | None = None,
) -> None:
    """Until SIGINT, SIGTERM or `stop`: `drain` finishes what runs, else it is handed back at once.

    An `async def` handler runs in the loop, a plain one in a thread. `client` serves `ctx.exec`.
    `beat_s` is how often leases are kept, by default three times within the shortest.
    """
    ending = stop or asyncio.Event()
    consumer = _Consumer(queue, handler, client, concurrency=concurrency, beat_s=beat_s)
    with _on_signals(ending) if signals else contextlib.nullcontext():
        await consumer.run(ending, drain=drain)


class _Running(msgspec.Struct):
    """One attempt under way; `until` is when its lease ends on our clock."""

    lease: Lease
    context: JobContext
    until: float
    task: asyncio.Task[None] | None = None


class _Consumer:
    """Runs one handler over one queue."""

    def __init__(
        self,
        queue: OmniqQueue,
        handler: Handler,
        client: Any,
        *,
        concurrency: int,
        beat_s: float | None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is at least 1, not {concurrency}")
        self._queue = queue
        self._handler = handler
        self._client = client
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004  # an object with an async call
        )
        self._slots = queue.slots = concurrency
        self._beat_s = beat_s
        self._running: dict[str, _Running] = {}
        self._outbox: list[Outcome] = []
        self._finished = asyncio.Event()
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._shortest_ms = _LEASE_MS_IDLE
        self._shorter = asyncio.Event()

    async def run(self, stop: asyncio.Event, *, drain: bool) -> None:
        """Serve until `stop`, then end as told."""
        settling = asyncio.create_task(self._settle_all())
        tending = [asyncio.create_task(self._keep_all()), asyncio.create_task(self._tend(stop))]
        try:
            await self._serve(stop)
            if not drain:
                self._hand_back()
            await self._all_ended(None if drain else _LEAVE_S)
        finally:
            for task in tending:
                task.cancel()
            await self._flushed()
            settling.cancel()
            await asyncio.gather(settling, *tending, return_exceptions=True)

    async def _all_ended(self, wait_s: float | None) -> None:
        """Until every handler has ended; one that ignores its cancellation is left behind."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._running:
                    self._finished.clear()
                    await self._finished.wait()

    # -- claim and start --------------------------------------------------------------------------

    async def _serve(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            free = self._slots - len(self._running)
            if free < 1 or len(self._outbox) > _BACKLOG_FACTOR * self._slots + 1000:
                await self._slot_or(stop)
                continue
            sent = self._loop.time()
            try:
                leases = await self._queue.claim(free, wait_ms=_CLAIM_WAIT_MS)
            except StoreError as error:
                warn("the store does not answer; trying again", error=str(error))
                await asyncio.sleep(0.2)
                continue
            for lease in leases:
                if stop.is_set():
                    self._end(Outcome(lease, "release"))
                else:
                    self._start(lease, sent)
            await asyncio.sleep(0)  # what needs no waiting is done before the next claim

    async def _slot_or(self, stop: asyncio.Event) -> None:
        self._finished.clear()
        waits = [asyncio.ensure_future(self._finished.wait()), asyncio.ensure_future(stop.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _start(self, lease: Lease, sent: float) -> None:
        own_loop = None if self._is_async else self._loop
        context = context_of(lease, Exec(self._client, lease.job_id, own_loop))
        running = _Running(lease, context, sent + lease.lease_ms / 1000)
        self._running[lease.token] = running
        running.task = self._loop.create_task(self._attempt(running))
        if lease.lease_ms < self._shortest_ms:
            self._shortest_ms = lease.lease_ms
            self._shorter.set()

    async def _attempt(self, running: _Running) -> None:
        lease = running.lease
        error: BaseException | None = None
        try:
            if self._is_async:
                await self._handler(running.context)
            else:
                error = await _run_in_thread(self._handler, running.context)
        except asyncio.CancelledError:
            self._over(lease)
            return
        except (Exception, SystemExit) as raised:  # a handler's exit ends its attempt, not us
            error = raised
        self._over(lease)
        if isinstance(error, LeaseLost) or running.context.lost.is_set():
            return
        if error is None:
            self._end(Outcome(lease, "complete"))
        else:
            self._end(judge(lease, error, None, random.random()))

    def _over(self, lease: Lease) -> None:
        self._running.pop(lease.token, None)
        self._finished.set()

    # -- end --------------------------------------------------------------------------------------

    def _end(self, outcome: Outcome) -> None:
        self._outbox.append(outcome)
        self._news.set()

    async def _settle_all(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(0)  # whatever ends in the same turn goes in the same call
            self._news.clear()
            batch = self._outbox[:]
            if batch and not await self._settle(batch):
                self._news.set()
                await asyncio.sleep(0.2)
            else:
                del self._outbox[: len(batch)]
                self._finished.set()

    async def _settle(self, batch: list[Outcome]) -> bool:
        """Whether the store has answered; what it has not is sent again."""
        try:
            verdicts = await self._queue.settle(batch)
        except StoreError as error:
            warn("outcomes are not written yet; trying again", error=str(error))
            return False
        for outcome, verdict in zip(batch, verdicts, strict=True):
            if isinstance(verdict, LeaseLost):
                warn("the lease was lost", job=outcome.lease.job_id, why=verdict.reason)
        return True

    async def _flushed(self) -> None:
        """Until everything that ended is written."""
        while self._outbox:
            self._finished.clear()
            await self._finished.wait()

    def _hand_back(self) -> None:
        for running in reversed(list(self._running.values())):  # each goes in front of the last
            running.context.lost.set()
            if running.task is not None:
                running.task.cancel()
            self._end(Outcome(running.lease, "release"))
            if not self._is_async:  # a thread cannot be stopped; nothing it returns counts
                self._over(running.lease)

    # -- keep and tend ----------------------------------------------------------------------------

    def _pause_s(self) -> float:
        leases = (running.lease.lease_ms for running in self._running.values())
        self._shortest_ms = min(leases, default=_LEASE_MS_IDLE)
        if self._beat_s is not None:
            return self._beat_s
        return max(_BEAT_S_MIN, self._shortest_ms / 3000)

    async def _keep_all(self) -> None:
        while True:
            self._shorter.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._shorter.wait()
                    continue  # a shorter lease began: the beat is faster now
            held = list(self._running.values())
            sent = self._loop.time()
            answers: Sequence[Lease | LeaseLost | None]
            try:
                answers = await self._queue.extend([running.lease for running in held])
            except StoreError:
                answers = [None] * len(held)  # unheard: their own time decides
            for running, answer in zip(held, answers, strict=True):
                self._heard(running, answer, sent)

    def _heard(self, running: _Running, answer: Lease | LeaseLost | None, sent: float) -> None:
        if isinstance(answer, Lease):
            if answer.lease_until_ms > running.lease.lease_until_ms:
                running.until = sent + answer.lease_ms / 1000
            running.lease = answer
        if isinstance(answer, LeaseLost) or running.until < self._loop.time():
            self._lose(running)
        elif answer is not None and answer.cancel_requested:
            self._cancel(running)

    def _lose(self, running: _Running) -> None:
        if running.lease.token in self._running:
            warn("the lease was lost; its handler is stopped", job=running.lease.job_id)
            self._stop(running)

    def _cancel(self, running: _Running) -> None:
        if running.lease.token in self._running:
            self._stop(running)
            self._end(Outcome(running.lease, "cancel"))

    def _stop(self, running: _Running) -> None:
        running.context.lost.set()
        if running.task is not None and self._is_async:
            running.task.cancel()

    async def _tend(self, stop: asyncio.Event) -> None:
        """Promote and take back, whatever the handlers do."""
        while not stop.is_set():
            try:
                await self._queue.upkeep()
                warn_quarantined(self._queue.name, self._queue.take_quarantined())
            except StoreError as error:
                warn("upkeep failed; trying again", error=str(error))
            await asyncio.sleep(_UPKEEP_S)


async def _run_in_thread(handler: Handler, context: JobContext) -> BaseException | None:
    """Run a plain handler in a daemon thread; what it raised, if anything.

    The interpreter waits at exit for the threads of a pool of the standard library. A consumer that
    has handed its jobs back must not wait for their handlers.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()
    variables = contextvars.copy_context()

    def end(error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result(error)

    def work() -> None:
        error: BaseException | None = None
        try:
            variables.run(handler, context)
        except BaseException as raised:  # whatever it is, it ends this attempt only
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(end, error)

    threading.Thread(target=work, daemon=True).start()
    return await ended


@contextlib.contextmanager
def _on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop`, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
