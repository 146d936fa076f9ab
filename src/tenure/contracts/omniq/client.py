"""OmniQ's own client with the names of its contract: `Client` for asyncio, `SyncClient` without.

    async with Client("redis://localhost:6379/0") as client:
        job_id = await client.publish("emails", {"to": "ada"}, gid="tenant-7", group_limit=2)
        job = await client.reserve("emails")
        if job is not None and job.status == "JOB":
            await client.ack_success("emails", job.job_id, job.lease_token)

Time is the server's unless `now_ms_override` is given. If an answer is lost, the client sends the
call again; the scripts recognise the repetition and execute it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeAlias, Unpack

import msgspec

from tenure.contracts.omniq import options as names
from tenure.contracts.omniq.calls import SCRIPTS, Calls, until_answered
from tenure.contracts.omniq.consume import Handler, consume
from tenure.contracts.omniq.monitor import Monitor
from tenure.contracts.omniq.options import Options, OptionValue, Refused, refusal
from tenure.contracts.omniq.queue import OmniqClaimer, OmniqQueue, cut_error, jitter
from tenure.contracts.omniq.repair import repair
from tenure.contracts.omniq.submission import (
    Publication,
    PublishOptions,
    check_number,
    new_ulid,
    publication,
    script_args,
    structured,
)
from tenure.core.errors import Conflict, StoreError
from tenure.core.seam import Quarantined
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import in_batches

Lane = Literal["wait", "gwait", "delayed", "failed", "completed"]
_LANES: tuple[Lane, ...] = ("wait", "gwait", "delayed", "failed", "completed")

_UPKEEP_STEP = 200
_COUNTER_CHARS_MAX = 128


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
    """The result for one job of a batch; `reason` says why `status` is ERR."""

    job_id: str
    status: Literal["OK", "ERR"]
    reason: str | None = None


ReserveResult: TypeAlias = Paused | Reserved | None
AckFailResult: TypeAlias = tuple[Literal["RETRY"], int] | tuple[Literal["FAILED"], None]


class _OneQueue(NamedTuple):
    """What the client keeps for one queue."""

    calls: Calls
    claimer: OmniqClaimer
    options: Options


class Client:
    """A client of one server, for one event loop; it connects on first use."""

    queue_base = staticmethod(names.queue_base)
    ulid = staticmethod(new_ulid)

    def __init__(self, redis_url: str = "redis://localhost:6379/0", *, worker_id: str = "") -> None:
        self._url = redis_url
        self._redis = Redis(redis_url, name="tenure-omniq")
        self._worker_id = worker_id or f"client-{secrets.token_hex(6)}"
        self._queues: dict[str, _OneQueue] = {}
        self.monitor = Monitor(self._redis)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @staticmethod
    def now_ms() -> int:
        """Milliseconds since the epoch, by this machine's clock."""
        return time.time_ns() // 1_000_000

    async def close(self) -> None:
        """Close the connections; leases that are still held expire."""
        for queue in self._queues.values():
            await queue.claimer.close()
        await self._redis.close()

    # -- publish ----------------------------------------------------------------------------------

    async def publish(
        self,
        queue: str,
        payload: dict[str, Any] | list[Any],
        *,
        now_ms_override: int = 0,
        **options: Unpack[PublishOptions],
    ) -> str:
        """Store one job; returns its id.

        Publishing an id again changes nothing; with another payload it raises `Conflict`.
        """
        (stored,) = await self._publish(queue, [publication(payload, **options)], now_ms_override)
        return stored

    async def publish_json(self, queue: str, payload: Any, **options: Any) -> str:
        """`publish` that also takes a dataclass, a msgspec struct or a pydantic model."""
        return await self.publish(queue, structured(payload), **options)

    async def publish_many(
        self,
        queue: str,
        jobs: Iterable[tuple[Any, Mapping[str, Any]]],
        *,
        now_ms_override: int = 0,
    ) -> list[str]:
        """Store many jobs, each a payload and the options of `publish`; returns their ids.

        All are checked before the first is stored. Each batch of five hundred is one script call.
        """
        made = [publication(payload, **options) for payload, options in jobs]
        return await self._publish(queue, made, now_ms_override)

    async def _publish(self, queue: str, jobs: Sequence[Publication], now_ms: int) -> list[str]:
        calls = self._of(queue).calls

        async def send(batch: Sequence[Publication]) -> list[str]:
            args = script_args(batch)
            _, *others = await until_answered(
                lambda: calls.run_once("publish", (now_ms,), 0, 0, *args, replicated=True)
            )
            for _, status, job_id, _ in others:
                if status == b"conflict":
                    raise Conflict(
                        f"publish: another job has the id {job_id.decode()!r}; nothing was changed",
                        contract=names.CONTRACT,
                        operation="publish",
                    )
            return [job.job_id for job in batch]

        return await in_batches(jobs, send)

    # -- leases -----------------------------------------------------------------------------------

    async def reserve(self, queue: str, now_ms_override: int = 0) -> ReserveResult:
        """Take one lease: None if there is no job, `Paused` if the queue is paused."""
        state, jobs = await self._reserve(queue, 1, now_ms_override)
        if jobs:
            return jobs[0]
        return Paused() if state == b"paused" else None

    async def reserve_many(
        self, queue: str, limit: int, *, now_ms_override: int = 0
    ) -> list[Reserved]:
        """Take up to `limit` leases at once; [] if there is no job or the queue is paused."""
        check_number("limit", limit, 1)
        return (await self._reserve(queue, limit, now_ms_override))[1]

    async def _reserve(self, queue: str, limit: int, now_ms: int) -> tuple[bytes, list[Reserved]]:
        claimer = self._of(queue).claimer
        reply = await until_answered(lambda: claimer.once(limit, now_ms=now_ms, with_upkeep=False))
        _warn_quarantined(queue, claimer.quarantine.take())
        return reply[0], [_reserved(*row) for row in reply[4]]

    async def heartbeat(
        self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0
    ) -> int:
        """Extend a lease to the job's timeout from now; returns when it ends."""
        args = (now_ms_override, self._worker_id, 0, job_id, lease_token, "")
        (reply,) = await self._run(queue, "extend", *args)
        if reply[0] == b"lost":
            raise refusal(job_id, reply[1])
        return int(reply[0])

    async def ack_success(
        self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0
    ) -> None:
        """Complete the job of a lease. A second ack raises `TokenMismatch`."""
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
        """Fail an attempt: ("RETRY", due_ms), or ("FAILED", None) after the last attempt."""
        reply = await self._ack(queue, job_id, lease_token, "fail", now_ms_override, error)
        return ("RETRY", int(reply[1])) if reply[0] == b"retry" else ("FAILED", None)

    async def _ack(
        self, queue: str, job_id: str, token: str, kind: str, now_ms: int, error: str = ""
    ) -> Any:
        calls, claimer, options = self._of(queue)
        last_error = cut_error(error)
        # A call that is repeated carries the same id, and only it gets the first answer again.
        request = secrets.token_hex(8)
        args: tuple[Arg, ...] = (
            options.keep_completed, options.keep_failed, jitter(), request,
            job_id, token, "", kind, 0, "", "", last_error, "", "error" if last_error else "",
        )  # fmt: skip
        (reply,) = await until_answered(
            lambda: calls.run_once("settle", (now_ms, self._worker_id), *args)
        )
        if reply != 1 and reply[0] == b"lost":
            raise refusal(job_id, reply[1])
        claimer.release(job_id)
        return reply

    # -- maintenance, pause -----------------------------------------------------------------------

    async def promote_delayed(
        self, queue: str, max_promote: int = 1000, now_ms_override: int = 0
    ) -> int:
        """Move due jobs into their lanes; returns how many."""
        return await self._upkeep(queue, "promote_delayed", max_promote, now_ms_override)

    async def reap_expired(self, queue: str, max_reap: int = 1000, now_ms_override: int = 0) -> int:
        """Take back expired leases; returns how many."""
        return await self._upkeep(queue, "reap_expired", max_reap, now_ms_override)

    async def _upkeep(self, queue: str, name: str, most: int, now_ms: int) -> int:
        """Work in steps, so that a thousand due jobs do not block the server's other clients."""
        done, recount = 0, False
        while done < most:
            step = min(_UPKEEP_STEP, most - done)
            _, count, *orphans = await self._run(queue, name, now_ms, step, 1)
            done += count
            recount = recount or 1 in orphans
            if count < step:
                break
        if recount:  # the job of a lease was deleted, and with it the name of its group
            await self.repair(queue)
        return done

    async def pause(self, queue: str) -> str:
        """Hand out no more leases; running jobs continue. Returns "OK"."""
        reply: bytes = await self._run(queue, "pause")
        return reply.decode()

    async def resume(self, queue: str) -> int:
        """Hand out leases again; 1, or 0 if the queue was not paused."""
        return int(await self._run(queue, "resume"))

    async def is_paused(self, queue: str) -> bool:
        """Whether the queue is paused."""
        key = f"{names.queue_base(queue)}:paused"
        return bool(await until_answered(lambda: self._redis.call("EXISTS", key)))

    # -- administration ---------------------------------------------------------------------------

    async def retry_failed(self, queue: str, job_id: str, *, now_ms_override: int = 0) -> None:
        """Send a failed job back, with all its attempts; raises `Refused`."""
        (item,) = await self.retry_failed_batch(queue, [job_id], now_ms_override=now_ms_override)
        _check_accepted("RETRY_FAILED", item)

    async def retry_failed_batch(
        self, queue: str, job_ids: Sequence[str], *, now_ms_override: int = 0
    ) -> list[BatchItem]:
        """Send failed jobs back; one answer per id."""
        answers = await self._of(queue).calls.apply_action("retry", job_ids, now_ms=now_ms_override)
        return [_batch_item(*pair) for pair in zip(job_ids, answers, strict=True)]

    async def remove_job(self, queue: str, job_id: str, lane: Lane) -> None:
        """Remove a job that is not running from its lane; raises `Refused`."""
        (item,) = await self.remove_jobs_batch(queue, lane, [job_id])
        _check_accepted("REMOVE_JOB", item)

    async def remove_jobs_batch(
        self, queue: str, lane: Lane, job_ids: Sequence[str]
    ) -> list[BatchItem]:
        """Remove jobs that are not running from a lane; one answer per id."""
        if lane not in _LANES:
            raise Refused("REMOVE_JOB", f"lane {lane!r}", "BAD_LANE")
        answers = await self._of(queue).calls.apply_action("remove", job_ids, lane=lane)
        return [_batch_item(*pair) for pair in zip(job_ids, answers, strict=True)]

    async def repair(self, queue: str) -> int:
        """Correct counters and index tables, as upkeep does; returns how many were wrong."""
        return await repair(self._of(queue).calls, names.queue_base(queue)[1:-1])

    async def childs_init(self, key: str, expected: int) -> None:
        """Begin to count `expected` children of the parent `key`."""
        reply = await self._count(key, "childs_init", expected)
        if reply[0] != b"OK":
            raise Refused("CHILDS_INIT", f"counter {key!r}", reply[1].decode())

    async def child_ack(self, key: str, child_id: str) -> int:
        """Count one child as done, once; returns how many are left, or -1 without a counter."""
        reply = await self._count(key, "child_ack", child_id, secrets.token_hex(8))
        if reply[0] != b"OK":
            return -1
        if reply[1] == 0:  # answered, so the record for a repetition can go
            with contextlib.suppress(StoreError):
                await self._redis.call("DEL", f"{_counter(key)}:last")
        return int(reply[1])

    async def _count(self, key: str, name: str, *args: Arg) -> Any:
        anchor = f"{_counter(key)}:meta"
        return await until_answered(lambda: self._redis.run(SCRIPTS[name], [anchor], args))

    async def consume(self, queue: str, handler: Handler, **settings: Any) -> None:
        """Run `handler(ctx)` for every job until a signal or the event `stop`.

        The settings are those of `consume.consume`: concurrency, drain, signals, stop, beat_s.
        """
        options = Options(queue=names.queue_base(queue)[1:-1])
        worker = f"{self._worker_id}-{secrets.token_hex(3)}"

        def open_queue() -> OmniqQueue:
            return OmniqQueue(Redis(self._url, name="tenure-omniq"), options, worker_id=worker)

        open_queue.__name__ = options.queue  # by which the worker's log names the queue
        await consume(open_queue, handler, self, **settings)

    async def _run(self, queue: str, name: str, *args: Arg) -> Any:
        calls = self._of(queue).calls
        return await until_answered(lambda: calls.run(name, *args))

    def _of(self, queue: str) -> _OneQueue:
        found = self._queues.get(queue)
        if found is None:
            options = Options(queue=names.queue_base(queue)[1:-1])
            calls = Calls(self._redis, options.queue)
            found = _OneQueue(calls, OmniqClaimer(calls, options, self._worker_id), options)
            self._queues[queue] = self._queues[options.queue] = found
        return found


class _Blocking:
    """Calls the coroutine functions of an object without `await`."""

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
    """`Client` for programs without an event loop, with the same arguments and answers.

        with SyncClient("redis://localhost:6379/0") as client:
            client.publish(queue="emails", payload={"to": "ada"})

    The calls run in an event loop in its own thread; threads may share one `SyncClient`.
    """

    def __init__(self, redis_url: str = "redis://localhost:6379/0", *, worker_id: str = "") -> None:
        self._open = functools.partial(Client, redis_url, worker_id=worker_id)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="omniq", daemon=True)
        self._thread.start()
        super().__init__(self._open(), self._in_loop)
        self.monitor = _Blocking(self._target.monitor, self._in_loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def consume(self, queue: str, handler: Handler, **settings: Any) -> None:
        """Run `handler(ctx)` for every job until a signal; it blocks this thread."""

        async def serve() -> None:
            async with self._open() as client:
                await client.consume(queue, handler, **settings)

        asyncio.run(serve())

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._thread.is_alive():
            self._in_loop(self._target.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _in_loop(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _warn_quarantined(queue: str, records: Iterable[Quarantined]) -> None:
    for record in records:
        import structlog  # slow to import, and rarely needed here

        log = structlog.get_logger("tenure.omniq")
        log.warning("record_quarantined", queue=queue, job_id=record.job_id, reason=record.reason)


def _reserved(
    job_id: bytes,
    payload: bytes,
    until: int,
    attempt: int,
    most: int,
    gid: bytes,
    token: bytes,
    *_: Any,
) -> Reserved:
    """A row of the claim script."""
    return Reserved(
        job_id=job_id.decode(),
        payload=payload.decode(errors="replace"),
        lock_until_ms=until,
        attempt=attempt,
        max_attempts=most,
        gid=gid.decode(errors="replace"),
        lease_token=token.decode(),
    )


def _batch_item(job_id: str, answer: str) -> BatchItem:
    return BatchItem(job_id, "OK") if answer == "OK" else BatchItem(job_id, "ERR", answer)


def _check_accepted(operation: str, item: BatchItem) -> None:
    if item.reason is not None:
        raise Refused(operation, f"job {item.job_id}", item.reason)


def _counter(key: str) -> str:
    """The prefix of a counter's keys; counters belong to no queue."""
    name = key.strip()
    if not name or len(name) > _COUNTER_CHARS_MAX or "{" in name or "}" in name:
        raise OptionValue(f"counter {key!r:.60}: 1 to {_COUNTER_CHARS_MAX} characters, no braces")
    return f"{{cc:{name}}}"
