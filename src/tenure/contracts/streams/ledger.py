"""Reads, cancels, retries and removes the jobs of this contract, and reads its journal."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from tenure.contracts.streams.options import CONTRACT, GROUP, QUEUE, Options, keys
from tenure.contracts.streams.queue import SCRIPTS
from tenure.core.errors import ServerError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import StreamFormat
from tenure.core.seam import (
    READ_STEP,
    Counts,
    LedgerFeatures,
    Page,
    Query,
    first_page,
    is_full,
)
from tenure.plans.schedule import StoredSchedules
from tenure.store.journal import HEAD, LineFormat, RedisJournal
from tenure.store.redis import Arg, Redis, is_wrong_type
from tenure.store.redis_queue import (
    RedisLedger,
    check_query,
    clock_ms,
    events_of,
    fields_of,
    in_batches,
    index_after,
    matches,
    number,
)
from tenure.store.redis_records import RedisRecords

_STATES = ("queued", "running", "done", "error", "canceled")
_CURSOR = re.compile(r"[0-9]{1,18}:.*", re.DOTALL)
_FOREIGN_SEEN_MS = 600_000
_INTERRUPT_MS = 60_000
_JOURNAL_FIELDS = (*HEAD, "result_h", "payload_h", "error_code", "due_ms", "data")


class StreamsJournal(RedisJournal):
    """The history of the queue: the stream `jobs:journal`, written by the scripts."""

    def __init__(self, redis: Redis, options: Options) -> None:
        lines = LineFormat(_JOURNAL_FIELDS, contract=CONTRACT, queue=QUEUE)
        super().__init__(redis, keys(options.namespace)[1], lines)


def stream_format(store: str, options: Options) -> StreamFormat:
    """The same stream for bulk readers; entries they have not captured yet are not trimmed."""
    all_keys = keys(options.namespace)
    return StreamFormat(
        store=store,
        key=all_keys[1],
        contract=CONTRACT,
        queue=QUEUE,
        fields=_JOURNAL_FIELDS,
        captured=(all_keys[4], "captured"),
    )


class StreamsLedger(RedisLedger):
    """The ledger of one queue, for one event loop."""

    _SLOTS_AT = 4

    def __init__(self, redis: Redis, options: Options) -> None:
        super().__init__(redis, f"{options.namespace}jobs:")
        self._options = options
        self._keys = keys(options.namespace)
        self._interrupts = f"{self._prefix}interrupt:{secrets.token_hex(6)}"
        self._last_interrupt: Arg = "0-0"

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures(
            unfinished=self.unfinished,
            changes=self.changes,
            waiter=self,
            schedules=StoredSchedules(RedisRecords(self._redis, self._prefix)),
        )

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None if it does not exist or has expired.

        A key that is not a hash is shown as a job that ended in `error` with code `unreadable`.
        """
        (flat,) = await self._redis.pipeline([("HGETALL", self._job_key(job_id))])
        return _record(job_id, flat) if flat else None

    async def find(self, query: Query, *, requester: str | None = None) -> Page:
        """Jobs by creation time, newest first; only those of `requester` if one is given."""
        check_query(query, _STATES, _CURSOR, CONTRACT)

        def is_wanted(record: JobRecord) -> bool:
            return matches(record, query) and requester in (None, record.requester)

        step_after = partial(index_after, self._redis, self._keys[6])
        return await self._page(query, self._job_key(""), step_after, _record, is_wanted)

    async def counts(self) -> Counts:
        """Jobs by state now, and totals since the queue was created."""
        stream, _, delayed, _, _, stats, _, paused, workers = self._keys
        replies = await self._redis.pipeline(
            [
                ("TIME",),
                ("XLEN", stream),
                ("XPENDING", stream, GROUP),
                ("ZCARD", delayed),
                ("HGETALL", stats),
                ("GET", paused),
                ("XINFO", "GROUPS", stream),
                ("HGETALL", workers),
            ]
        )
        # A key of the wrong type counts as missing; the next claim moves it away.
        clock, length, pending, waiting_for_time, totals, paused_since, groups, beats = (
            None if isinstance(reply, ServerError) else reply for reply in replies
        )
        length, running = length or 0, int(pending[0]) if pending else 0
        names = fields_of(totals)
        now = clock_ms(clock or (0, 0))
        undelivered, oldest = await self._undelivered(groups, length, running, now)
        return Counts(
            states={
                "queued": undelivered + (waiting_for_time or 0),
                "running": running,
                **{state: number(names.get(state)) for state in _STATES[2:]},
            },
            totals={name: number(value) for name, value in names.items()},
            paused=bool(paused_since and paused_since.isdigit()),
            workers=len(self._alive(beats, now)),
            oldest_waiting_ms=oldest,
        )

    async def unfinished(self, requester: str, most: int) -> int:
        """How many jobs of a requester have not ended; of all requesters if fewer than `most`.

        Where there are many jobs, it is an estimate from a sample.
        """
        return int(await self._run("unfinished", requester, most))

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The entries of the job's event stream after the id `after`."""
        start = f"({after}" if after else "-"
        key = f"{self._job_key(job_id)}:events"
        events: list[JobEvent] = []
        while not is_full(events, limit):
            count = min(READ_STEP, limit - len(events))
            step = events_of(await self._redis.call("XRANGE", key, start, "+", "COUNT", count))
            events += step
            if len(step) < count:
                break
            start = f"({step[-1].event_id}"
        return first_page(events, limit)

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        """New events of many jobs, each after its cursor; never blocks."""
        if not cursors:
            return {}
        names, after = self._keys_and_ids(cursors)
        reply = await self._redis.call("XREAD", "COUNT", 1000, "STREAMS", *names, *after)
        return self._by_job(reply or ())

    async def wait_changes(
        self, cursors: Mapping[str, str], *, wait_ms: int
    ) -> dict[str, list[JobEvent]]:
        """Like `changes`, but waits for the first event, or until `interrupt`."""
        names, after = self._keys_and_ids(cursors)
        streams = (self._interrupts, *names, self._last_interrupt, *after)
        reply = await self._redis.block(
            "XREAD", "COUNT", 1000, "BLOCK", wait_ms, "STREAMS", *streams, wait_ms=wait_ms
        )
        found = reply or []
        if found and found[0][0].decode() == self._interrupts:
            self._last_interrupt = found.pop(0)[1][-1][0]
        return self._by_job(found)

    async def interrupt(self) -> None:
        """End the wait of `wait_changes` by an entry in a stream that it reads as well."""
        await self._redis.pipeline(
            [
                ("XADD", self._interrupts, "MAXLEN", 1, "*", "i", 1),
                ("PEXPIRE", self._interrupts, _INTERRUPT_MS),
            ]
        )

    async def has_foreign_workers(self) -> bool:
        """Whether the group has consumers that are not in the hash of our workers."""
        consumers, known = await self._redis.pipeline(
            [("XINFO", "CONSUMERS", self._keys[0], GROUP), ("HKEYS", self._keys[8])]
        )
        if isinstance(consumers, ServerError) or isinstance(known, ServerError):
            return False
        return any(
            one["name"] not in known and (one["pending"] or one["idle"] < _FOREIGN_SEEN_MS)
            for one in map(fields_of, consumers)
        )

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._run("pause", "pause")

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._run("pause", "resume")

    def _keys_and_ids(self, cursors: Mapping[str, str]) -> tuple[list[Arg], list[Arg]]:
        names: list[Arg] = [f"{self._job_key(job_id)}:events" for job_id in cursors]
        return names, [cursor or "0-0" for cursor in cursors.values()]

    def _by_job(self, reply: Any) -> dict[str, list[JobEvent]]:
        skip = len(self._options.namespace) + len("job:")
        return {key.decode()[skip : -len(":events")]: events_of(entries) for key, entries in reply}

    def _job_key(self, job_id: str) -> str:
        return f"{self._options.namespace}job:{job_id}"

    async def _run(self, name: str, *args: Arg) -> Any:
        return await self._redis.run(SCRIPTS[name], self._keys, (self._options.namespace, *args))

    async def _apply_action(self, action: str, job_ids: Sequence[str]) -> list[str]:
        async def send(batch: Sequence[str]) -> list[str]:
            return [reply.decode() for reply in await self._run("steer", action, *batch)]

        return await in_batches(job_ids, send)

    async def _undelivered(
        self, groups: Any, length: int, running: int, now: int
    ) -> tuple[int, int]:
        """How many entries no consumer has received, and how long the oldest has waited."""
        start = "-"
        lag: int | None = length
        if not length:
            return 0, 0
        for flat in groups or ():
            group = fields_of(flat)
            if group.get("name") == GROUP.encode():
                start = f"({group['last-delivered-id'].decode()}"
                lag = group.get("lag", max(0, length - running))
        first = await self._redis.call("XRANGE", self._keys[0], start, "+", "COUNT", 1)
        oldest = now - int(first[0][0].split(b"-")[0]) if first else 0
        return (lag if lag is not None else max(0, length - running)), max(0, oldest)


def _record(job_id: str, flat: Any) -> JobRecord:
    if isinstance(flat, ServerError):
        return _unreadable(job_id, flat)
    raw = fields_of(flat)

    def text(name: str) -> str:
        return str(raw.get(name, b""), errors="replace")

    fence, _, attempt, max_attempts, lost, lease_until, worker = _lease_fields(text("lease"))
    trace = text("entry").rpartition(" ")[2]
    return JobRecord(
        job_id=job_id,
        contract=CONTRACT,
        queue=QUEUE,
        task=text("task"),
        state=text("status"),
        payload=raw.get("payload", b"null"),
        result=raw.get("result", b""),
        error=raw.get("error", b""),
        attempt=int(attempt),
        max_attempts=int(max_attempts),
        fence=int(fence),
        created_ms=number(raw.get("created_ts")),
        updated_ms=number(raw.get("updated_ts")),
        due_ms=number(raw.get("due_ms")),
        lease_until_ms=int(lease_until),
        ttl_ms=number(raw.get("ttl_s")) * 1000,
        worker_id="" if worker in ("-", "+") else worker,
        requester=text("requester"),
        progress=raw.get("progress", b""),
        trace="" if trace == "-" else trace,
        extra={
            "ttl_s": number(raw.get("ttl_s")),
            "cancel_requested": raw.get("cancel") == b"1",
            "leases_lost": int(lost),
        },
    )


def _unreadable(job_id: str, error: ServerError) -> JobRecord:
    """The record of a job whose key is not a hash."""
    if not is_wrong_type(error):
        raise error
    message = f"job:{job_id} is not a hash; another program wrote it"
    return JobRecord(
        job_id=job_id,
        contract=CONTRACT,
        queue=QUEUE,
        task="",
        state="error",
        payload=b"null",
        error=msgspec.json.encode({"code": "unreadable", "message": message, "retryable": False}),
    )


def _lease_fields(packed: str) -> list[str]:
    """The hash field `lease` (see lua/include/job.lua); zeros if another program wrote it."""
    fields = packed.split(" ")
    if len(fields) == 7 and all(field.isdecimal() and len(field) < 16 for field in fields[:6]):
        return fields
    return ["0", "0", "0", "0", "0", "0", "-"]
