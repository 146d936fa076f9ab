"""Lines of the log, for the parts of this contract that run without `tenure.Worker`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import queue
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from tenure.contracts.omniq.queue import OmniqQueue
from tenure.core.errors import LeaseLost, StoreError
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome
from tenure.core.quarantine import Quarantined
from tenure.core.retry import judge
from tenure.core.values import from_json


def warn(text: str, **facts: object) -> None:
    """A warning. Programs that only look at a queue do not load what writes it."""
    import structlog

    structlog.get_logger("tenure.omniq").warning(text, **facts)


def warn_quarantined(queue: str, records: Iterable[Quarantined]) -> None:
    """One line for each record that was set aside."""
    for record in records:
        warn("record_quarantined", queue=queue, job_id=record.job_id, reason=record.reason)


class Exec:
    """The calls of one attempt, made by the contract's `client`.

    `loop` is the client's, for handlers that run outside of it.
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


_Call: TypeAlias = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Threads:
    """At most `most` daemon threads, started when first needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._started = 0
        self._busy = 0

    async def run(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """The function's value; its exception is raised here."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()
        self._busy += 1
        if self._busy > self._started and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._work, args=(loop,), daemon=True).start()
        self._calls.put((lambda: context.run(function, argument), future))
        try:
            return await future
        finally:
            self._busy -= 1

    def close(self) -> None:
        """Let the threads end when they are free."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:  # told to the waiter, whatever it is
                error = raised
            try:
                loop.call_soon_threadsafe(_tell, future, value, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return


def _tell(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(_Raised(error))


class _Raised(Exception):
    """Carries what a handler raised: a future takes no StopIteration, and an exit would end us."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def raised_by(error: BaseException) -> BaseException:
    """What the handler itself raised."""
    return error.error if isinstance(error, _Raised) else error


_CLAIM_WAIT_MS = 200
_UPKEEP_S = 1.0
_BEAT_S_MIN = 0.05
# How long leases are taken to be while there is none; also bounds how late a cancel is heard.
_LEASE_MS_IDLE = 3_000
_BACKLOG_FACTOR = 8
_LEAVE_S = 1.0


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

    An `async def` handler runs in the loop, a plain one in a thread; `client` serves its
    `ctx.exec`. `beat_s` is how often leases
    are kept, by default three times within the shortest.
    """
    ending = stop or asyncio.Event()
    consumer = Consumer(queue, handler, client, concurrency=concurrency, beat_s=beat_s)
    with _on_signals(ending) if signals else contextlib.nullcontext():
        await consumer.run(ending, drain=drain)


class _Running(msgspec.Struct):
    """One attempt under way; `until` is when its lease ends on our clock."""

    lease: Lease
    context: JobContext
    until: float
    task: asyncio.Task[None] | None = None


class Consumer:
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
        self._threads = Threads(concurrency)
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
            self._threads.close()
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
        try:
            if self._is_async:
                await self._handler(running.context)
            else:
                await self._threads.run(self._handler, running.context)
            outcome = Outcome(lease, "complete")
        except asyncio.CancelledError:
            self._over(lease)
            return
        except (Exception, SystemExit) as error:  # a handler's exit ends its attempt, not us
            reason = raised_by(error)
            if isinstance(reason, LeaseLost):
                self._over(lease)
                return
            outcome = judge(lease, reason, None, random.random())
        self._over(lease)
        if not running.context.lost.is_set():
            self._end(outcome)

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
