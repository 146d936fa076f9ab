"""`consume`, the contract's helper that runs a handler for every job of a queue.

It is `tenure.Worker` for one queue and one handler, which is given OmniQ's `ctx`. If a handler's
lease is lost, it is cancelled; in a thread it has to look at `ctx.lost`. Nothing more is written
for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from tenure.contracts.omniq.queue import OmniqQueue
from tenure.core.encoding import from_json
from tenure.core.lease import Lease

if TYPE_CHECKING:
    from tenure.worker import Task

_CLAIM_WAIT_MS = 200
_BEAT_MS = 1_000
_DRAIN_MS = 30 * 86_400_000
_LOST_POLL_S = 0.02


class Lost:
    """`ctx.lost`: set when the attempt was ended from outside, so that its outcome is ignored.

    That is when the lease was lost, the job was cancelled, or the consumer hands it back.
    """

    def __init__(self, is_set: Callable[[], bool] = lambda: False) -> None:
        self.is_set = is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Block a plain handler until it is set; False if `timeout` seconds passed before."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while not self.is_set():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOST_POLL_S)
        return True


class Exec:
    """`ctx.exec`: the calls of the client that a handler may make, with OmniQ's names.

    An `async def` handler awaits them. A plain handler runs in a thread, and the calls block it;
    `loop` is then the loop of the client.
    """

    def __init__(
        self, client: Any, job_id: str, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._loop = loop

    def publish(self, queue: str, payload: dict[str, Any] | list[Any], **options: Any) -> Any:
        """Store a job, with the options of `Client.publish`; returns its id."""
        return self._call(self._client.publish(queue, payload, **options))

    def pause(self, queue: str) -> Any:
        """Hand out no more leases of a queue."""
        return self._call(self._client.pause(queue))

    def resume(self, queue: str) -> Any:
        """Hand out leases again."""
        return self._call(self._client.resume(queue))

    def is_paused(self, queue: str) -> Any:
        """Whether a queue is paused."""
        return self._call(self._client.is_paused(queue))

    def childs_init(self, key: str, expected: int) -> Any:
        """Begin to count children of a parent."""
        return self._call(self._client.childs_init(key, expected))

    def child_ack(self, key: str, child_id: str | None = None) -> Any:
        """Count this job, or the child named, as done; returns how many are left."""
        return self._call(self._client.child_ack(key, child_id or self._job_id))

    def _call(self, made: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            return made
        return asyncio.run_coroutine_threadsafe(made, self._loop).result()


class JobContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler is given."""

    queue: str
    job_id: str
    payload_raw: str
    payload: Any
    attempt: int
    max_attempts: int
    lock_until_ms: int
    lease_token: str
    gid: str
    lost: Lost
    exec: Exec


Handler: TypeAlias = Callable[[JobContext], Awaitable[Any] | Any]


def context_of(lease: Lease, tools: Exec, lost: Lost | None = None) -> JobContext:
    """The context of one attempt."""
    raw = lease.payload.decode(errors="replace")
    try:
        payload = from_json(lease.payload)
    except msgspec.DecodeError:
        payload = raw  # another client stored text that is not JSON
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
        lost=lost or Lost(),
        exec=tools,
    )


async def consume(
    open_queue: Callable[[], OmniqQueue],
    handler: Handler,
    client: Any,
    *,
    concurrency: int = 1,
    drain: bool = True,
    signals: bool = True,
    stop: asyncio.Event | None = None,
    beat_s: float | None = None,
) -> None:
    """Run jobs until SIGINT, SIGTERM or `stop`. Then finish those that run, or hand them back.

    With `drain` it waits for the handlers; without it, their jobs go back to the queue at once. An
    `async def` handler runs in the loop, a plain one in a thread. `client` makes the calls of
    `ctx.exec`. `beat_s` is the longest time between two extensions of a lease.
    """
    # Only a consumer needs the worker; other users of this contract do not load it.
    from tenure.worker import Settings, Worker
    from tenure.worker.telemetry import ensure_logs

    ensure_logs(level="warning")
    settings = Settings(
        concurrency=concurrency,
        claim_wait_ms=_CLAIM_WAIT_MS,
        keeper_ms_max=_BEAT_MS if beat_s is None else max(1, round(beat_s * 1000)),
        drain_ms=_DRAIN_MS if drain else 0,
    )
    worker = Worker([_task(handler, client)], queues=[open_queue], settings=settings)

    def release_at_once(name: str, _count: int) -> None:
        if name == "releasing" and not drain:  # claims under way have ended by now
            worker.stop(at_once=True)

    worker.watch.hooks.append(release_at_once)
    stop = stop or asyncio.Event()
    watching = asyncio.create_task(_stop_on(stop, worker.stop))
    with _set_by_signals(stop) if signals else contextlib.nullcontext():
        try:
            await worker.serve()
        finally:
            watching.cancel()


async def _stop_on(event: asyncio.Event, stop: Callable[[], None]) -> None:
    await event.wait()
    stop()


@contextlib.contextmanager
def _set_by_signals(event: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set the event. Only the main thread can handle signals."""
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    for number in numbers:
        loop.add_signal_handler(number, event.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _task(handler: Handler, client: Any) -> Task:
    """The handler as a task for all jobs; what it returns is not stored, as in OmniQ."""
    from tenure.worker import Job, task

    loop = asyncio.get_running_loop()
    call = getattr(handler, "__call__", None)  # noqa: B004  # of an object with an async call
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call):

        async def run(job: Job) -> None:
            tools = Exec(client, job.id)
            await handler(context_of(job.lease, tools, Lost(lambda: job.cancelled)))

        return task("*")(run)

    def run_in_thread(job: Job) -> None:
        tools = Exec(client, job.id, loop)
        handler(context_of(job.lease, tools, Lost(lambda: job.cancelled)))

    return task("*")(run_in_thread)
