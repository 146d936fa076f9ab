"""Reading and steering the jobs of this contract, and its journal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tenure.contracts.omniq.calls import Calls
from tenure.contracts.omniq.options import CONTRACT, Options, queue_base
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import StreamFormat
from tenure.core.seam import (
    PAGE_BYTES,
    READ_STEP,
    Counts,
    LedgerFeatures,
    Page,
    Query,
    WorkerBeat,
    first_page,
    is_full,
    weight,
)
from tenure.store.journal import HEAD, Lines, StreamJournal
from tenure.store.redis import Redis
from tenure.store.redis_queue import (
    INDEX_STEP,
    WORKER_ALIVE_MS,
    check_query,
    clock_ms,
    event_of,
    fields_of,
    index_after,
    number,
    read_all,
    read_hashes,
    readable,
)

_STATES = ("wait", "delayed", "active", "completed", "failed")
_CURSOR = re.compile(r"[0-9]{1,18}:.+", re.DOTALL)
# One call of `find` looks at no more jobs than this; a rarer task is found page by page.
_SCAN_MAX = 5_000
_WORDS = {"OK": "ok", "REQUESTED": "requested", "NO_JOB": "missing", "ACTIVE": "active"}
_RESULT_INLINE_MAX = 4096
_JOURNAL_FIELDS = (*HEAD, "gid", "result_h", "payload_h", "error_code", "due_ms", "data")


class OmniqJournal(StreamJournal):
    """The history of one queue: the stream `{queue}:journal`, written by our scripts.

    A line that names no task is of the queue's task. What other OmniQ clients do is not in it; the
    next step that we make says what it found.
    """

    def __init__(self, redis: Redis, options: Options) -> None:
        task = options.task or options.queue
        lines = Lines(_JOURNAL_FIELDS, contract=CONTRACT, queue=options.queue, task=task)
        super().__init__(redis, f"{queue_base(options.queue)}:journal", lines)


def tape(store: str, options: Options) -> StreamFormat:
    """The same stream for bulk readers; it is trimmed only behind what they captured."""
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


class OmniqLedger:
    """The ledger of one queue, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._options = options
        self._calls = Calls(redis, options.queue)
        self._base = queue_base(options.queue)
        self._task = options.task or options.queue

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures()

    async def get(self, job_id: str) -> JobRecord | None:
        """The job's hash, or None when there is none (any more)."""
        (flat,) = await read_all(self._redis, [("HGETALL", f"{self._base}:job:{job_id}")])
        return self._record(job_id, flat) if flat else None

    async def find(self, query: Query) -> Page:
        """Jobs by when they last changed state, newest first; `after` is `ms:job_id`."""
        check_query(query, _STATES, _CURSOR, CONTRACT)
        found: list[JobRecord] = []
        after, scanned, read = query.after, 0, 0
        while scanned < _SCAN_MAX:
            step = await self._newest(query.states or _STATES, after)
            async for entered, job_id, flat in read_hashes(self._redis, f"{self._base}:job:", step):
                after = f"{entered}:{job_id}"
                scanned += 1
                fields = readable(flat)
                record = self._record(job_id, fields) if fields else None
                read += weight(record) if record else 0
                if record and _matches(record, query):
                    found.append(record)
                if len(found) >= query.limit or read >= PAGE_BYTES:
                    return Page(found, after)
            if len(step) < INDEX_STEP:
                return Page(found)
        return Page(found, after)

    async def counts(self) -> Counts:
        """How many jobs are where now; totals are of what our own clients did."""
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
                ("HVALS", f"{key}:workers"),
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
            workers=sum(
                now - number(beat.split(b" ")[0]) < WORKER_ALIVE_MS for beat in beats or ()
            ),
            oldest_waiting_ms=max(0, now - number(first[1])) if first else 0,
        )

    async def workers(self) -> list[WorkerBeat]:
        """Workers of ours that claimed lately, also in vain; others leave no trace."""
        flat, clock = await read_all(self._redis, [("HGETALL", f"{self._base}:workers"), ("TIME",)])
        oldest = clock_ms(clock) - WORKER_ALIVE_MS
        beats = [
            WorkerBeat(name, *map(number, words.split(b" ")[:2]))
            for name, words in fields_of(flat).items()
        ]
        return [beat for beat in beats if beat.last_ms > oldest]

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """What happened to one job, after an event id."""
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
        seen = _position(after)
        events = [created] if _position(created.event_id) > seen else []
        events += _entries(step)
        while len(step or ()) == READ_STEP and not is_full(events, limit):
            start = f"({step[-1][0].decode()}"
            (step,) = await read_all(self._redis, [("XRANGE", key, start, "+", "COUNT", READ_STEP)])
            events += _entries(step)
        if len(step or ()) < READ_STEP:
            events += [event for event in ended if _position(event.event_id) > seen]
        return first_page(events, limit)

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._calls.run("pause")

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._calls.run("resume")

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send failed jobs back; per id "ok", "missing" or "not_failed"."""
        return await self._steer("retry", job_ids)

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (its worker is told), "missing", "finished"."""
        return await self._steer("cancel", job_ids)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok", "missing" or "active"."""
        return await self._steer("remove", job_ids)

    async def probe(self) -> None:
        """Raise `StoreError` where the server takes no writes."""
        await self._redis.call("SET", f"{self._base}:probe", "", "PX", 1)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _steer(self, verb: str, job_ids: Sequence[str]) -> list[str]:
        words = await self._calls.steer(verb, job_ids, keep_failed=self._options.keep_failed)
        return [_WORDS.get(word, word.lower()) for word in words]

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


def _matches(record: JobRecord, query: Query) -> bool:
    return (not query.states or record.state in query.states) and (
        not query.task or record.task == query.task
    )


def _record(job_id: str, fields: dict[str, bytes], queue: str, task: str) -> JobRecord:
    """The stored job; `task` is what a job that names none is called."""

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
    """Our own JSON of the last error, or the text of another client that failed the job since."""
    said = fields.get("last_error", b"")
    if not said:
        return b""
    ours = fields.get("error", b"")
    if ours and fields.get("error_ms") == fields.get("last_error_ms"):
        return ours
    return msgspec.json.encode({"code": "error", "message": said.decode(errors="replace")})


def _first_and_last(fields: dict[str, bytes], last: Any) -> list[JobEvent]:
    """The job's first event and, once it has completed, its last: its hash tells both.

    `last` is the last entry of its stream, which holds what was between them. A job that just runs
    and completes has no stream.
    """
    created = number(fields.get("created_ms"))
    events = [JobEvent(event_id=f"{max(0, created - 1)}-0", type="wait", ts_ms=created)]
    if fields.get("state") == b"completed":
        ended = number(fields.get("completed_ms"))
        before = [*events, *_entries(last)]
        last_ms, last_seq = _position(before[-1].event_id)
        at = max((ended, 0), (last_ms, last_seq + 1))
        result = fields.get("result", b"null")
        data = b'{"result":%b}' % result if len(result) <= _RESULT_INLINE_MAX else b"{}"
        events.append(
            JobEvent(event_id=f"{at[0]}-{at[1]}", type="completed", ts_ms=ended, data=data)
        )
    return events


def _entries(entries: Any) -> list[JobEvent]:
    return [event_of(*entry) for entry in entries or ()]


def _position(event_id: str) -> tuple[int, int]:
    """An event id as something that sorts."""
    ms, _, seq = event_id.partition("-")
    return int(ms or 0), int(seq or 0)
