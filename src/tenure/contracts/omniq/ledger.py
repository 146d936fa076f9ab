"""Reads, cancels, retries and removes the jobs of this contract, and reads its journal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from tenure.contracts.omniq.calls import Calls
from tenure.contracts.omniq.options import CONTRACT, Options, queue_base
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
from tenure.store.redis import Redis
from tenure.store.redis_queue import (
    INDEX_STEP,
    RedisLedger,
    check_query,
    clock_ms,
    events_of,
    fields_of,
    index_after,
    matches,
    number,
    read_all,
    readable,
)
from tenure.store.redis_records import RedisRecords

_STATES = ("wait", "delayed", "active", "completed", "failed")
_CURSOR = re.compile(r"[0-9]{1,18}:.*", re.DOTALL)
_ANSWERS = {"OK": "ok", "REQUESTED": "requested", "NO_JOB": "missing", "ACTIVE": "active"}
_RESULT_INLINE_MAX = 4096
_JOURNAL_FIELDS = (*HEAD, "gid", "result_h", "payload_h", "error_code", "due_ms", "data")


class OmniqJournal(RedisJournal):
    """The history of one queue: the stream `{queue}:journal`, written by our scripts.

    A line without a task is of the queue's task. The steps of other OmniQ clients are not in it;
    our next step of the same job records the state that it found.
    """

    def __init__(self, redis: Redis, options: Options) -> None:
        task = options.task or options.queue
        lines = LineFormat(_JOURNAL_FIELDS, contract=CONTRACT, queue=options.queue, task=task)
        super().__init__(redis, f"{queue_base(options.queue)}:journal", lines)


def stream_format(store: str, options: Options) -> StreamFormat:
    """The same stream for bulk readers; entries they have not captured yet are not trimmed."""
    base = queue_base(options.queue)
    return StreamFormat(
        store=store,
        key=f"{base}:journal",
        contract=CONTRACT,
        queue=options.queue,
        fields=_JOURNAL_FIELDS,
        task=options.task or options.queue,
        captured=(f"{base}:upkeep", "captured"),
    )


class OmniqLedger(RedisLedger):
    """The ledger of one queue, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._base = queue_base(options.queue)
        super().__init__(redis, f"{self._base}:")
        self._options = options
        self._calls = Calls(redis, options.queue)
        self._task = options.task or options.queue

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures(schedules=StoredSchedules(RedisRecords(self._redis, self._prefix)))

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None if it does not exist or was trimmed."""
        (flat,) = await read_all(self._redis, [("HGETALL", f"{self._base}:job:{job_id}")])
        return self._record(job_id, flat) if flat else None

    async def find(self, query: Query) -> Page:
        """Jobs by when they last changed state, newest first."""
        check_query(query, _STATES, _CURSOR, CONTRACT)

        def parse(job_id: str, reply: Any) -> JobRecord | None:
            flat = readable(reply)
            return self._record(job_id, flat) if flat else None

        step_after = partial(self._newest, query.states or _STATES)
        prefix = f"{self._base}:job:"
        return await self._page(query, prefix, step_after, parse, partial(matches, query=query))

    async def counts(self) -> Counts:
        """Jobs by state now; the totals count the steps of our own clients."""
        key = self._base
        replies = await read_all(
            self._redis,
            [
                ("LLEN", f"{key}:wait"),
                ("HGET", f"{key}:stats", "group_waiting"),
                ("ZCARD", f"{key}:delayed"),
                ("ZCARD", f"{key}:active"),
                ("LLEN", f"{key}:completed"),
                ("LLEN", f"{key}:failed"),
                ("EXISTS", f"{key}:paused"),
                ("HGETALL", f"{key}:counters"),
                ("HGETALL", f"{key}:workers"),
                ("ZRANGE", f"{key}:idx:wait", 0, 0, "WITHSCORES"),
                ("TIME",),
            ],
        )
        wait, grouped, delayed, active, completed, failed, paused, totals, beats, first, clock = (
            replies
        )
        now = clock_ms(clock)
        return Counts(
            states={
                "wait": (wait or 0) + number(grouped),
                "delayed": delayed or 0,
                "active": active or 0,
                "completed": completed or 0,
                "failed": failed or 0,
            },
            totals={name: number(value) for name, value in fields_of(totals).items()},
            paused=bool(paused),
            workers=len(self._alive(beats, now)),
            oldest_waiting_ms=max(0, now - number(first[1])) if first else 0,
        )

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The events of one job after an event id."""
        key = f"{self._base}:events:{job_id}"
        start = f"({after}" if after else "-"
        flat, last, step = await read_all(
            self._redis,
            [
                ("HGETALL", f"{self._base}:job:{job_id}"),
                ("XREVRANGE", key, "+", "-", "COUNT", 1),
                ("XRANGE", key, start, "+", "COUNT", READ_STEP),
            ],
        )
        if not flat:
            return []
        created, *ended = _first_and_last(fields_of(flat), last)
        seen = _sort_key(after)
        events = [created] if _sort_key(created.event_id) > seen else []
        events += events_of(step)
        while len(step or ()) == READ_STEP and not is_full(events, limit):
            start = f"({step[-1][0].decode()}"
            (step,) = await read_all(self._redis, [("XRANGE", key, start, "+", "COUNT", READ_STEP)])
            events += events_of(step)
        if len(step or ()) < READ_STEP:
            events += [event for event in ended if _sort_key(event.event_id) > seen]
        return first_page(events, limit)

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._calls.run("pause")

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._calls.run("resume")

    async def _apply_action(self, action: str, job_ids: Sequence[str]) -> list[str]:
        answers = await self._calls.apply_action(
            action, job_ids, keep_failed=self._options.keep_failed
        )
        return [_ANSWERS.get(answer, answer.lower()) for answer in answers]

    def _record(self, job_id: str, flat: Any) -> JobRecord:
        return _record(job_id, fields_of(flat), self._options.queue, self._task)

    async def _newest(self, states: Sequence[str], after: str) -> list[tuple[int, str]]:
        """The next jobs of all the states together, by (time, id)."""
        merged: dict[str, int] = {}
        for state in states:
            for entered, job_id in await index_after(
                self._redis, f"{self._base}:idx:{state}", after
            ):
                merged[job_id] = max(entered, merged.get(job_id, entered))
        return sorted(((ms, job_id) for job_id, ms in merged.items()), reverse=True)[:INDEX_STEP]


def _record(job_id: str, fields: dict[str, bytes], queue: str, task: str) -> JobRecord:
    """The stored job; `task` is for jobs that name none."""

    def text(name: str) -> str:
        return fields.get(name, b"").decode(errors="replace")

    ours = text("tn").split(" ")
    if len(ours) != 8:
        ours = ["0", "0", "", "0", "-", "-", "-", "0"]
    attempt, state = number(fields.get("attempt")), text("state")
    return JobRecord(
        job_id=job_id,
        contract=CONTRACT,
        queue=queue,
        task=text("task") or task,
        state=state,
        payload=fields.get("payload", b"null"),
        result=_result(fields, state),
        error=_error(fields) if attempt or state == "failed" else b"",
        attempt=attempt,
        max_attempts=number(fields.get("max_attempts")),
        fence=number(ours[1].encode()),
        created_ms=number(fields.get("created_ms")),
        updated_ms=number(fields.get("updated_ms")),
        due_ms=number(fields.get("due_ms")),
        lease_until_ms=number(fields.get("lock_until_ms")),
        gid=text("gid"),
        worker_id="" if ours[4] == "-" else ours[4],
        requester=text("requester"),
        progress=fields.get("progress", b""),
        trace=text("trace"),
        extra={
            "timeout_ms": number(fields.get("timeout_ms")),
            "backoff_ms": number(fields.get("backoff_ms")),
            "cancel_requested": fields.get("cancel") == b"1",
        },
    )


def _result(fields: dict[str, bytes], state: str) -> bytes:
    return fields.get("result", b"null" if state == "completed" else b"")


def _error(fields: dict[str, bytes]) -> bytes:
    """Our JSON of the last error, unless another client has failed the job since."""
    last_error = fields.get("last_error", b"")
    if not last_error:
        return b""
    ours = fields.get("error", b"")
    if ours and fields.get("error_ms") == fields.get("last_error_ms"):
        return ours
    return msgspec.json.encode({"code": "error", "message": last_error.decode(errors="replace")})


def _first_and_last(fields: dict[str, bytes], last: Any) -> list[JobEvent]:
    """The job's first event and, if it has completed, its last one, made from its hash.

    The job's stream has the events between them, and `last` is its last entry. A job that runs once
    and completes has no stream.
    """
    created = number(fields.get("created_ms"))
    events = [JobEvent(event_id=f"{max(0, created - 1)}-0", type="wait", ts_ms=created)]
    if fields.get("state") == b"completed":
        ended = number(fields.get("completed_ms"))
        before = [*events, *events_of(last)]
        last_ms, last_seq = _sort_key(before[-1].event_id)
        at = max((ended, 0), (last_ms, last_seq + 1))
        result = fields.get("result", b"null")
        data = b'{"result":%b}' % result if len(result) <= _RESULT_INLINE_MAX else b"{}"
        events.append(
            JobEvent(event_id=f"{at[0]}-{at[1]}", type="completed", ts_ms=ended, data=data)
        )
    return events


def _sort_key(event_id: str) -> tuple[int, int]:
    ms, _, seq = event_id.partition("-")
    return int(ms or 0), int(seq or 0)
