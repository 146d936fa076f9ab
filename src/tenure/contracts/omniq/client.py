"""What the calls of OmniQ's own client answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import msgspec

from tenure.contracts.omniq import options as names
from tenure.contracts.omniq.calls import SCRIPTS, Calls, insist
from tenure.contracts.omniq.consume import Handler, consume, warn_quarantined
from tenure.contracts.omniq.monitor import Monitor
from tenure.contracts.omniq.options import (
    BACKOFF_MS,
    MAX_ATTEMPTS,
    TIMEOUT_MS,
    Options,
    OptionValue,
    Refused,
    refusal,
)
from tenure.contracts.omniq.queue import Claimer, OmniqQueue, jitter
from tenure.contracts.omniq.repair import repair
from tenure.contracts.omniq.submission import (
    BACKOFF_MS_MAX,
    Backoff,
    Publication,
    check_number,
    new_ulid,
    publication,
    script_args,
    structured,
)
from tenure.core.errors import Conflict, StoreError
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import BATCH_MAX
from tenure.store.resending import part

Lane = Literal["wait", "gwait", "delayed", "failed", "completed"]
LANES: tuple[Lane, ...] = ("wait", "gwait", "delayed", "failed", "completed")


class Paused(msgspec.Struct, frozen=True):
    """`reserve` of a paused queue."""

    status: Literal["PAUSED"] = "PAUSED"


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: `payload` is the JSON text, `lease_token` gates heartbeat and acks."""

    status: Literal["JOB"] = "JOB"
    job_id: str
    payload: str
    lock_until_ms: int
    attempt: int
    max_attempts: int
    gid: str
    lease_token: str


class BatchItem(msgspec.Struct, frozen=True):
    """What became of one job of a batch: `status` is OK or ERR, and then `reason` says why."""

    job_id: str
    status: Literal["OK", "ERR"]
    reason: str | None = None


ReserveResult: TypeAlias = Paused | Reserved | None
AckFailResult: TypeAlias = tuple[Literal["RETRY"], int] | tuple[Literal["FAILED"], None]


def reserved(row: list[Any]) -> Reserved:
    """A row of the claim script."""
    return Reserved(
        job_id=row[0].decode(),
        payload=row[1].decode(errors="replace"),
        lock_until_ms=row[2],
        attempt=row[3],
        max_attempts=row[4],
        gid=row[5].decode(errors="replace"),
        lease_token=row[6].decode(),
    )


def batch_item(job_id: str, word: str) -> BatchItem:
    """The steering script's word for one job."""
    return BatchItem(job_id, "OK") if word == "OK" else BatchItem(job_id, "ERR", word)


def check_accepted(operation: str, item: BatchItem) -> None:
    """Raise `Refused` for a job that was not accepted."""
    if item.reason is not None:
        raise Refused(operation, f"job {item.job_id}", item.reason)


_KEY_CHARS_MAX = 128


class Children:
    """The counters of one server; a counter belongs to no queue."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def begin(self, key: str, expected: int) -> None:
        """Expect so many children; raises `Refused` when a count is under way."""
        word = await self._run("childs_init", key, expected)
        if word[0] != b"OK":
            raise Refused("CHILDS_INIT", f"counter {key!r}", word[1].decode())

    async def ack(self, key: str, child_id: str) -> int:
        """How many are left; -1 when there is no counter."""
        word = await self._run("child_ack", key, child_id, secrets.token_hex(8))
        if word[0] != b"OK":
            return -1
        if word[1] == 0:  # heard, so nothing needs to be remembered for a resend
            with contextlib.suppress(StoreError):
                await self._redis.call("DEL", f"{{cc:{_checked(key)}}}:last")
        return int(word[1])

    async def _run(self, name: str, key: str, *args: Arg) -> Any:
        anchor = f"{{cc:{_checked(key)}}}:meta"
        return await insist(lambda: self._redis.run(SCRIPTS[name], [anchor], args))


def _checked(key: str) -> str:
    name = key.strip()
    if not name or len(name) > _KEY_CHARS_MAX or "{" in name or "}" in name:
        raise OptionValue(f"counter {key!r:.60}: 1 to {_KEY_CHARS_MAX} characters, no braces")
    return name


_TEND_STEP = 200
_ERROR_BYTES_MAX = 4096


class _Line(msgspec.Struct, frozen=True):
    """What the client keeps of one queue."""

    calls: Calls
    claimer: Claimer
    options: Options


class Client:
    """A client for one event loop; it connects on first use and may work on any queue."""

    queue_base = staticmethod(names.queue_base)
    ulid = staticmethod(new_ulid)

    def __init__(self, redis_url: str = "redis://localhost:6379/0", *, worker_id: str = "") -> None:
        self._url = redis_url
        self._redis = Redis(redis_url, name="tenure-omniq")
        self._worker_id = worker_id or f"client-{secrets.token_hex(6)}"
        self._lines: dict[str, _Line] = {}
        self._children = Children(self._redis)
        self.monitor = Monitor(self._redis)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @staticmethod
    def now_ms() -> int:
        """Milliseconds since the epoch, by this machine's clock."""
        return time.time_ns() // 1_000_000

    async def close(self) -> None:
        """Let go of the connections; leases that are still held run out by themselves."""
        for line in self._lines.values():
            await line.claimer.close()
        await self._redis.close()

    # -- publish ----------------------------------------------------------------------------------

    async def publish(
        self,
        queue: str,
        payload: dict[str, Any] | list[Any],
        *,
        job_id: str | None = None,
        timeout_ms: int = TIMEOUT_MS,
        max_attempts: int = MAX_ATTEMPTS,
        backoff_ms: int = BACKOFF_MS,
        due_ms: int = 0,
        gid: str | None = None,
        group_limit: int = 0,
        backoff: Backoff = "fixed",
        backoff_ms_max: int = BACKOFF_MS_MAX,
        now_ms_override: int = 0,
    ) -> str:
        """Store one job; returns its id.

        The same id again is the same job; with another payload it raises `Conflict`. `backoff`
        "exponential" doubles `backoff_ms` with every attempt, with jitter, for workers of ours.
        """
        job = publication(
            payload,
            job_id=job_id,
            timeout_ms=timeout_ms,
            max_attempts=max_attempts,
            backoff_ms=backoff_ms,
            due_ms=due_ms,
            gid=gid,
            group_limit=group_limit,
            backoff=backoff,
            backoff_ms_max=backoff_ms_max,
        )
        (stored,) = await self._publish(queue, [job], now_ms_override)
        return stored

    async def publish_json(self, queue: str, payload: Any, **options: Any) -> str:
        """`publish` for a dataclass, a msgspec struct or a pydantic model, too."""
        return await self.publish(queue, structured(payload), **options)

    async def publish_many(
        self,
        queue: str,
        jobs: Iterable[tuple[Any, Mapping[str, Any]]],
        *,
        now_ms_override: int = 0,
    ) -> list[str]:
        """Store many jobs, each a payload and the options of `publish`; their ids in order.

        All are checked before the first is stored; each batch of five hundred is one step.
        """
        made = [publication(payload, **_PUBLISHED | dict(given)) for payload, given in jobs]
        return await self._publish(queue, made, now_ms_override)

    async def _publish(self, queue: str, jobs: Sequence[Publication], now_ms: int) -> list[str]:
        line = self._line(queue)
        ids: list[str] = []
        for start in range(0, len(jobs), BATCH_MAX):
            chunk = jobs[start : start + BATCH_MAX]
            args = script_args(chunk)
            publish = insist(
                lambda args=args: line.calls.remembered("publish", (now_ms,), 0, 0, *args)
            )
            _, *others = await part(start, publish)
            for _, status, job_id, _ in others:
                if status == b"conflict":
                    raise Conflict(
                        f"publish: another job has the id {job_id.decode()!r}; nothing was changed",
                        contract=names.CONTRACT,
                        operation="publish",
                    )
            ids += [job.job_id for job in chunk]
        return ids

    # -- leases -----------------------------------------------------------------------------------

    async def reserve(self, queue: str, now_ms_override: int = 0) -> ReserveResult:
        """Take one lease: None when there is no job, `Paused` when there may be none."""
        state, jobs = await self._reserve(queue, 1, now_ms_override)
        if jobs:
            return jobs[0]
        return Paused() if state == b"paused" else None

    async def reserve_many(
        self, queue: str, limit: int, *, now_ms_override: int = 0
    ) -> list[Reserved]:
        """Take up to `limit` leases in one step; [] when there is no job or the queue is paused."""
        check_number("limit", limit, 1)
        return (await self._reserve(queue, limit, now_ms_override))[1]

    async def _reserve(self, queue: str, limit: int, now_ms: int) -> tuple[bytes, list[Reserved]]:
        claimer = self._line(queue).claimer
        reply = await insist(lambda: claimer.once(limit, now_ms=now_ms, tends=False))
        warn_quarantined(queue, claimer.quarantine.take())
        return reply[0], [reserved(row) for row in reply[4]]

    async def heartbeat(
        self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0
    ) -> int:
        """Keep a lease for the job's timeout from now; returns when it ends."""
        calls = self._line(queue).calls
        (reply,) = await insist(
            lambda: calls.run(
                "extend", now_ms_override, self._worker_id, 0, job_id, lease_token, ""
            )
        )
        if reply[0] == b"lost":
            raise refusal(job_id, reply[1])
        return int(reply[0])

    async def ack_success(
        self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0
    ) -> None:
        """End a lease: done. A second ack raises `TokenMismatch`."""
        await self._ack(queue, job_id, lease_token, "complete", now_ms_override)

    async def ack_fail(
        self,
        queue: str,
        job_id: str,
        lease_token: str,
        now_ms_override: int = 0,
        *,
        error: str = "",
    ) -> AckFailResult:
        """End a lease: it failed. ("RETRY", due_ms), or ("FAILED", None) after the last attempt."""
        reply = await self._ack(queue, job_id, lease_token, "fail", now_ms_override, error)
        return ("RETRY", int(reply[1])) if reply[0] == b"retry" else ("FAILED", None)

    async def _ack(
        self, queue: str, job_id: str, token: str, kind: str, now_ms: int, error: str = ""
    ) -> Any:
        line = self._line(queue)
        said = error.encode(errors="replace")[:_ERROR_BYTES_MAX].decode(errors="ignore")
        # The same for every resend by `insist`, so that only those are answered alike.
        request = secrets.token_hex(8)
        args: tuple[Arg, ...] = (
            line.options.keep_completed, line.options.keep_failed, jitter(), request,
            job_id, token, "", kind, 0, "", "", said, "", "error" if said else "",
        )  # fmt: skip
        (reply,) = await insist(
            lambda: line.calls.remembered("settle", (now_ms, self._worker_id), *args)
        )
        if reply != 1 and reply[0] == b"lost":
            raise refusal(job_id, reply[1])
        line.claimer.release(job_id)
        return reply

    # -- maintenance, pause -----------------------------------------------------------------------

    async def promote_delayed(
        self, queue: str, max_promote: int = 1000, now_ms_override: int = 0
    ) -> int:
        """Let due jobs join their lanes; how many did."""
        return await self._tend(queue, "promote_delayed", max_promote, now_ms_override)

    async def reap_expired(self, queue: str, max_reap: int = 1000, now_ms_override: int = 0) -> int:
        """Take back leases that ran out; how many did."""
        return await self._tend(queue, "reap_expired", max_reap, now_ms_override)

    async def _tend(self, queue: str, name: str, most: int, now_ms: int) -> int:
        """In steps, so that a thousand due jobs do not keep the server from everybody else."""
        calls = self._line(queue).calls
        done, recount = 0, False
        while done < most:
            step = min(_TEND_STEP, most - done)
            _, count, *orphans = await insist(lambda step=step: calls.run(name, now_ms, step, 1))
            done += count
            recount = recount or 1 in orphans
            if count < step:
                break
        if recount:  # a lease had no job any more: which group's slot it held is counted anew
            await self.repair(queue)
        return done

    async def pause(self, queue: str) -> str:
        """Hand out no more leases; what runs goes on. Returns "OK"."""
        reply: bytes = await insist(lambda: self._line(queue).calls.run("pause"))
        return reply.decode()

    async def resume(self, queue: str) -> int:
        """Hand out leases again; 1, or 0 when the queue was not paused."""
        return int(await insist(lambda: self._line(queue).calls.run("resume")))

    async def is_paused(self, queue: str) -> bool:
        """Whether the queue is paused."""
        key = f"{names.queue_base(queue)}:paused"
        return bool(await insist(lambda: self._redis.call("EXISTS", key)))

    # -- administration ---------------------------------------------------------------------------

    async def retry_failed(self, queue: str, job_id: str, *, now_ms_override: int = 0) -> None:
        """Send a failed job back, with all its attempts; raises `Refused`."""
        (item,) = await self.retry_failed_batch(queue, [job_id], now_ms_override=now_ms_override)
        check_accepted("RETRY_FAILED", item)

    async def retry_failed_batch(
        self, queue: str, job_ids: Sequence[str], *, now_ms_override: int = 0
    ) -> list[BatchItem]:
        """Send failed jobs back; one answer per id."""
        calls = self._line(queue).calls
        words = await calls.steer("retry", job_ids, now_ms=now_ms_override)
        return [batch_item(*pair) for pair in zip(job_ids, words, strict=True)]

    async def remove_job(self, queue: str, job_id: str, lane: Lane) -> None:
        """Remove a job that nobody runs from the lane where it stands; raises `Refused`."""
        (item,) = await self.remove_jobs_batch(queue, lane, [job_id])
        check_accepted("REMOVE_JOB", item)

    async def remove_jobs_batch(
        self, queue: str, lane: Lane, job_ids: Sequence[str]
    ) -> list[BatchItem]:
        """Remove jobs that nobody runs from a lane; one answer per id."""
        if lane not in LANES:
            raise Refused("REMOVE_JOB", f"lane {lane!r}", "BAD_LANE")
        words = await self._line(queue).calls.steer("remove", job_ids, lane=lane)
        return [batch_item(*pair) for pair in zip(job_ids, words, strict=True)]

    async def repair(self, queue: str) -> int:
        """Put counters and mirror tables right, as upkeep does; how many entries were wrong."""
        return await repair(self._line(queue).calls, names.queue_base(queue)[1:-1])

    async def childs_init(self, key: str, expected: int) -> None:
        """Begin to count `expected` children of the parent `key`."""
        await self._children.begin(key, expected)

    async def child_ack(self, key: str, child_id: str) -> int:
        """One child is done, and counts once; how many are left, or -1 without a counter."""
        return await self._children.ack(key, child_id)

    async def consume(
        self,
        queue: str,
        handler: Handler,
        *,
        concurrency: int = 1,
        drain: bool = True,
        signals: bool = True,
        **settings: Any,
    ) -> None:
        """Run `handler(ctx)` for every job until a signal (or `stop`, an event) ends it.

        See `consuming.consume` for the settings.
        """
        options = Options(queue=names.queue_base(queue)[1:-1])
        worker = f"{self._worker_id}-{secrets.token_hex(3)}"
        source = OmniqQueue(Redis(self._url, name="tenure-omniq"), options, worker_id=worker)
        try:
            await consume(
                source,
                handler,
                self,
                concurrency=concurrency,
                drain=drain,
                signals=signals,
                **settings,
            )
        finally:
            await source.close()

    def _line(self, queue: str) -> _Line:
        line = self._lines.get(queue)
        if line is None:
            options = Options(queue=names.queue_base(queue)[1:-1])
            calls = Calls(self._redis, options.queue)
            line = _Line(calls, Claimer(calls, options, self._worker_id), options)
            self._lines[queue] = self._lines[options.queue] = line
        return line


_PUBLISHED: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(Client.publish).parameters.items()
    if parameter.default is not parameter.empty and name != "now_ms_override"
}
"""The options of `publish`, which `publish_many` takes for each job, and their defaults."""


class _Blocking:
    """An object whose coroutine functions are called and answer."""

    def __init__(self, target: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._target = target
        self._run = run

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @functools.wraps(found)
        def call(*args: Any, **options: Any) -> Any:
            return self._run(found(*args, **options))

        return call


class SyncClient(_Blocking):
    """`Client` without `await`; arguments and answers are the same."""

    def __init__(self, redis_url: str = "redis://localhost:6379/0", *, worker_id: str = "") -> None:
        self._open = functools.partial(Client, redis_url, worker_id=worker_id)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="omniq", daemon=True)
        self._thread.start()
        super().__init__(self._open(), self._in_loop)
        self.monitor = _Blocking(self._target.monitor, self._in_loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def consume(self, queue: str, handler: Handler, **settings: Any) -> None:
        """Run `handler(ctx)` for every job in this thread until a signal ends it."""

        async def serve() -> None:
            async with self._open() as client:
                await client.consume(queue, handler, **settings)

        asyncio.run(serve())

    def close(self) -> None:
        """Let go of the connections, and end the thread."""
        if self._thread.is_alive():
            self._in_loop(self._target.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _in_loop(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
