"""Reads and steers a queue for gateway, dashboard and command line; reads its journal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tenure.contracts.bullmq.options import (
    CONTRACT,
    PRIORITY_MAX,
    Options,
    client_name,
    keys,
    unpack_options,
)
from tenure.contracts.bullmq.plans import BullmqSchedules
from tenure.contracts.bullmq.records import (
    LISTS,
    STATES,
    Finder,
    events_by_job,
    json_or_text,
    read_children,
    read_events,
    state_keys,
)
from tenure.contracts.bullmq.schedulers import read_schedulers
from tenure.contracts.bullmq.scripts import Scripts
from tenure.core.encoding import to_json
from tenure.core.errors import Conflict, NotFound, UsageError
from tenure.core.job import Children, JobEvent, JobRecord, position
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
from tenure.store.journal import HEAD, LineFormat, RedisJournal
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import (
    BATCH_MAX,
    check_query,
    clock_ms,
    fields_of,
    number,
    read_all,
)
from tenure.store.resend import run_step

_CURSOR = re.compile(r"-?[0-9]{1,18}:.+", re.DOTALL)
_EVENTS_SCANNED_MAX = 100_000
_EVENTS_STEP = 1_000
# Events that repeat another one or belong to another request.
_NOT_SHOWN = frozenset({"retries-exhausted", "retry", "duplicated", "deduplicated"})
# The parts of a line, as journal_tail() in queue.lua writes them; new ones are added at the end.
_JOURNAL_FIELDS = (
    *(*HEAD, "due_ms", "error_code", "payload_h", "result_h", "token_h", "priority", "data"),
)


class BullmqJournal(RedisJournal):
    """The history of the queue: the stream `tenure:journal` beside BullMQ's keys."""

    def __init__(self, redis: Redis, options: Options) -> None:
        lines = LineFormat(_JOURNAL_FIELDS, contract=CONTRACT, queue=options.queue)
        super().__init__(redis, keys(options.key_prefix).journal, lines)


def stream_format(store: str, options: Options) -> StreamFormat:
    """The same stream for bulk readers; events that they have not captured are not trimmed."""
    named = keys(options.key_prefix)
    return StreamFormat(
        store=store,
        key=named.journal,
        contract=CONTRACT,
        queue=options.queue,
        fields=_JOURNAL_FIELDS,
        captured=(named.meta, "tenure.captured"),
    )


class SchedulerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler: the template of its jobs, when the next one is due, and how many it made.

    It has either `every` (ms) or `pattern`. Times are ms; 0 or "" means none.
    """

    scheduler_id: str
    name: str
    next_ms: int
    iterations: int = 0
    every: int = 0
    offset: int = 0
    pattern: str = ""
    tz: str = ""
    limit: int = 0
    start_ms: int = 0
    end_ms: int = 0
    data: Any = None
    options: dict[str, Any] = {}


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of finished jobs: `points` per minute, the newest first, `count` in all.

    `length` is how many minutes are kept.
    """

    count: int
    points: list[int]
    length: int
    previous_ms: int = 0
    previous_count: int = 0


class BullmqLedger:
    """The ledger of one queue, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._options = options
        self._scripts = Scripts(redis, options)
        self._finder = Finder(redis, options)
        self._prefix = options.key_prefix

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures(
            changes=self.changes,
            schedules=BullmqSchedules(self._redis, self._options, self._scripts),
        )

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None if there is none (any more)."""
        (record,) = await self._finder.records([job_id])
        return record

    async def find(self, query: Query) -> Page:
        """Jobs by creation time, newest first. `after` is `created_ms:job_id` of the last seen."""
        check_query(query, STATES, _CURSOR, CONTRACT)
        listed = await self._finder.newest(query.states or STATES, query.after)
        ids, found = list(listed), list[JobRecord]()
        last, read = "", 0
        for start in range(0, len(ids), READ_STEP):
            for record in await self._finder.records(ids[start : start + READ_STEP], listed):
                if record is None:
                    continue
                matches = not query.task or record.task == query.task
                if (matches and len(found) >= query.limit) or read >= PAGE_BYTES:
                    return Page(found, last)
                last, read = f"{record.created_ms}:{record.job_id}", read + weight(record)
                if matches:
                    found.append(record)
        return Page(found)

    async def counts(self) -> Counts:
        """Depth by state now."""
        own = self._scripts.keys
        sizes = [
            ("LLEN" if state in LISTS else "ZCARD", key)
            for state, key in state_keys(self._prefix).items()
        ]
        replies = await read_all(
            self._redis,
            [
                *sizes,
                ("HGET", own.meta, "paused"),
                ("LINDEX", own.wait, -1),
                ("CLIENT", "LIST"),
                ("TIME",),
            ],
        )
        numbers, (is_paused, oldest, clients, clock) = replies[:8], replies[8:]
        states = dict(zip(STATES, (count or 0 for count in numbers), strict=True))
        now = clock_ms(clock)
        # Counted as Node's getWorkers() does it, by the names of connections.
        names = [fields.get("name", "") for fields in _connections(clients)]
        plain = client_name(self._options)
        named = {name for name in names if name.startswith(f"{plain}:w:")}
        return Counts(
            states=states,
            totals={"completed": states["completed"], "failed": states["failed"]},
            paused=bool(is_paused),
            workers=len(named) + names.count(plain),
            oldest_waiting_ms=await self._waiting_ms(oldest, now),
        )

    async def workers(self) -> list[WorkerBeat]:
        """Workers whose connection carries their name, as Node's getWorkers() sees them.

        Our own workers also write how many jobs they run at once to a key that no client of
        BullMQ reads.
        """
        clients, clock, flat = await read_all(
            self._redis,
            [("CLIENT", "LIST"), ("TIME",), ("HGETALL", f"{self._prefix}tenure:workers")],
        )
        now = clock_ms(clock)
        start = f"{client_name(self._options)}:w:"
        found: dict[str, int] = {}
        for fields in _connections(clients):
            if fields.get("name", "").startswith(start):
                name = fields["name"][len(start) :]
                heard = now - 1000 * int(fields.get("idle", "0"))
                found[name] = max(heard, found.get(name, 0))
        own = fields_of(flat)
        beats = []
        for name, heard_ms in found.items():
            at, _, slots = own.get(name, b"").partition(b" ")
            beats.append(WorkerBeat(name, max(heard_ms, number(at)), number(slots)))
        return beats

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The events of one job after a stream id.

        The stream belongs to the whole queue and is trimmed: an old job may have no events left.
        """
        events: list[JobEvent] = []
        start = f"({after}" if after else "-"
        scanned, count = 0, READ_STEP
        while scanned < _EVENTS_SCANNED_MAX and not is_full(events, limit):
            entries = await self._redis.call(
                "XRANGE", self._scripts.keys.events, start, "+", "COUNT", count
            )
            events += [e for e in read_events(entries, job_id) if e.type not in _NOT_SHOWN]
            if len(entries) < count:
                break
            start, scanned = f"({entries[-1][0].decode()}", scanned + count
            # Most entries are about other jobs: read more of them at once if they are small.
            size = sum(len(text) for _, flat in entries for text in flat)
            count = min(2_000, 4 * count) if size < PAGE_BYTES // 8 else READ_STEP
        return first_page(events, limit)

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        """The new events of many jobs, each after its own position: the stream is read once."""
        if not cursors:
            return {}
        first = min(cursors.values(), key=position)
        start, found = f"({first}" if first else "-", dict[str, list[JobEvent]]()
        for _ in range(_EVENTS_SCANNED_MAX // _EVENTS_STEP):
            entries = await self._redis.call(
                "XRANGE", self._scripts.keys.events, start, "+", "COUNT", _EVENTS_STEP
            )
            for job_id, events in events_by_job(entries, cursors).items():
                shown = [event for event in events if event.type not in _NOT_SHOWN]
                found.setdefault(job_id, []).extend(shown)
            if len(entries) < _EVENTS_STEP:
                break
            start = f"({entries[-1][0].decode()}"
        return found

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._scripts.run("pause", "pause")

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._scripts.run("pause", "resume")

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Run finished jobs again, with all attempts; per id "ok", "missing", or its state."""
        return await self._apply_action(job_ids, "retry")

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Cancel jobs; per id "ok" (it waited), "requested" (it runs), "missing", or its state."""
        return await self._apply_action(job_ids, "cancel")

    async def remove(self, job_ids: Sequence[str], *, children: bool = True) -> list[str]:
        """Remove jobs, and by default their children; per id "ok", "missing", or "active" if the
        job or one of those children runs."""
        return await self._run_ids("remove", (int(children),), job_ids)

    async def promote(self, job_ids: Sequence[str]) -> list[str]:
        """Let delayed jobs run now; per id "ok", "missing", or its other state."""
        return await self._apply_action(job_ids, "promote")

    async def change_delay(self, job_ids: Sequence[str], delay_ms: int) -> list[str]:
        """Let delayed jobs run `delay_ms` from now; per id "ok", "missing", or its other state."""
        if delay_ms < 0:
            raise UsageError(f"a delay cannot be negative: {delay_ms} ms", contract=CONTRACT)
        return await self._apply_action(job_ids, "delay", delay_ms)

    async def change_priority(
        self, job_ids: Sequence[str], priority: int, *, first: bool = False
    ) -> list[str]:
        """Change the priority of jobs (0 is the highest), with `first` before those of the same
        priority; per id "ok", "missing", or "completed" or "failed"."""
        if not 0 <= priority <= PRIORITY_MAX:
            raise UsageError(
                f"priority {priority}: a whole number from 0 to {PRIORITY_MAX}", contract=CONTRACT
            )
        return await self._apply_action(job_ids, "priority", priority, int(first))

    async def update_data(self, job_id: str, data: Any) -> None:
        """Replace the data of a job, as BullMQ's `updateData`; a handler that runs has the old."""
        (answer,) = await self._apply_action([job_id], "data", to_json(data))
        if answer == "missing":
            raise NotFound(f"there is no job {job_id}", contract=CONTRACT)

    async def retry_all(self, state: str = "failed", *, before_ms: int | None = None) -> int:
        """Run every failed (or completed) job again that ended by `before_ms`; how many.

        As in BullMQ's `retryJobs`, attempts keep their count and priorities are ignored.
        """
        if state not in ("failed", "completed"):
            raise UsageError(f"state {state!r}: only failed or completed jobs can be sent back")
        last = before_ms if before_ms is not None else await self._redis.server_time_ms()
        return await self._bulk(state, last)

    async def promote_all(self) -> int:
        """Let every delayed job run now, as BullMQ's `promoteJobs`; how many."""
        return await self._bulk("delayed", 0)

    async def drain(self, *, delayed: bool = False) -> int:
        """Remove every job that waits, with `delayed` also delayed ones; how many."""
        return len(await self._scripts.run("sweep", "drain", 1 if delayed else 0, 0, 0))

    async def clean(self, state: str, *, older_ms: int = 0, limit: int = 1_000) -> list[str]:
        """Remove jobs of a state that are older than `older_ms`; returns their ids.

        `limit` (0: none) bounds how many are looked at, those first whose turn is next.
        """
        name = {"waiting": "wait", "wait": "wait", "paused": "wait"}.get(state, state)
        if name not in ("wait", *STATES):
            raise UsageError(f"no such state: {state}; there are {', '.join(STATES)}")
        removed = await self._scripts.run("sweep", "clean", name, older_ms, limit)
        return [each.decode() for each in removed]

    async def children(self, job_id: str) -> Children:
        """The children of a job: results, failures, and which have not ended."""
        return await read_children(self._redis, self._prefix + job_id)

    async def logs(self, job_id: str) -> list[str]:
        """The lines that handlers logged to the job."""
        lines = await self._redis.call("LRANGE", f"{self._prefix}{job_id}:logs", 0, -1)
        return [line.decode(errors="replace") for line in lines]

    async def log(self, job_id: str, line: str, *, keep: int = 0) -> int:
        """Add a line to the job's log, and keep at most `keep` (0: all); how many lines it has."""
        key = self._prefix + job_id
        if not await self._redis.call("EXISTS", key):
            raise NotFound(f"there is no job {job_id} to log to", contract=CONTRACT)
        commands: list[tuple[Arg, ...]] = [("RPUSH", f"{key}:logs", line)]
        if keep:
            commands.append(("LTRIM", f"{key}:logs", -keep, -1))
        replies = await self._redis.pipeline(commands)
        return min(replies[0], keep) if keep else int(replies[0])

    async def jobs(
        self, *states: str, start: int = 0, end: int = -1, ascending: bool = False
    ) -> list[JobRecord]:
        """The jobs of each state from rank `start` to `end` (-1: the last), the newest first or
        the next to run first; as BullMQ's `getJobs`."""
        unknown = set(states) - set(STATES)
        if unknown or not states:
            raise UsageError(f"name states: {', '.join(STATES)}", contract=CONTRACT)
        listed = await self._finder.between(states, start, end, ascending=ascending)
        found = await self._finder.records(list(listed), listed)
        return [record for record in found if record is not None]

    async def schedulers(self, *, start: int = 0, end: int = -1) -> list[SchedulerRecord]:
        """The schedulers, the next one due first."""
        found = await read_schedulers(self._redis, self._prefix, start, end)
        return [_scheduler(*each) for each in found]

    async def metrics(self, kind: str = "completed", *, start: int = 0, end: int = -1) -> Metrics:
        """Finished jobs per minute, if workers count them (`metrics_minutes`)."""
        if kind not in ("completed", "failed"):
            raise UsageError(f"metrics are kept of completed and failed jobs, not of {kind!r}")
        key = f"{self._prefix}metrics:{kind}"
        fields, points, length = await read_all(
            self._redis,
            [
                ("HMGET", key, "count", "prevTS", "prevCount"),
                ("LRANGE", f"{key}:data", start, end),
                ("LLEN", f"{key}:data"),
            ],
        )
        count, previous_ms, previous_count = (number(each) for each in fields or (b"",) * 3)
        return Metrics(
            count=count,
            points=[number(each) for each in points or ()],
            length=length or 0,
            previous_ms=previous_ms,
            previous_count=previous_count,
        )

    async def trim_events(self, length: int) -> int:
        """Keep about `length` of the newest events; how many were removed."""
        return int(
            await self._redis.call("XTRIM", self._scripts.keys.events, "MAXLEN", "~", length)
        )

    async def remove_deduplication_key(self, deduplication_id: str) -> bool:
        """Free a deduplication id for the next job that has it; False if it was free."""
        return bool(await self._redis.call("DEL", f"{self._prefix}de:{deduplication_id}"))

    async def obliterate(self, *, force: bool = False) -> None:
        """Pause the queue and remove it with all its jobs; with `force` also those that run."""
        await self._scripts.run("pause", "pause")
        more = 1
        while more == 1:
            more = await self._scripts.run("obliterate", BATCH_MAX, int(force))
        if more < 0:
            what = "it was resumed meanwhile" if more == -1 else "jobs run in it; force ends them"
            raise Conflict(f"the queue cannot be obliterated: {what}", contract=CONTRACT)
        for pattern in ("tenure:add:*", "tenure:idem:*", "tenure:quarantine*"):
            async for found in self._scripts.scan(pattern):
                if found:
                    await run_step(self._redis.call("UNLINK", *found), executed_before=True)

    async def probe(self) -> None:
        """Raise `StoreError` if the server takes no writes."""
        await self._redis.call("SET", f"{self._prefix}tenure:probe", "", "PX", 1)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _apply_action(
        self, job_ids: Sequence[str], action: str, value: Arg = "", first: int = 0
    ) -> list[str]:
        return await self._run_ids("steer", (action, value, first), job_ids)

    async def _run_ids(self, script: str, head: Sequence[Arg], ids: Sequence[str]) -> list[str]:
        replies = await self._scripts.run_rows(script, head, [(job_id,) for job_id in ids])
        return [reply.decode() for reply in replies]

    async def _bulk(self, state: str, last_ms: int) -> int:
        sent = 0
        while moved := await run_step(
            self._scripts.run("bulk", state, BATCH_MAX, last_ms), executed_before=sent > 0
        ):
            sent += moved
            if moved < BATCH_MAX:
                break
        return sent

    async def _waiting_ms(self, job_id: bytes | None, now: int) -> int:
        if not job_id:
            return 0
        key = self._prefix.encode() + job_id
        (created,) = await self._redis.pipeline([("HGET", key, "timestamp")])
        return max(0, now - number(created)) if isinstance(created, bytes) else 0


def _connections(clients: bytes) -> Iterator[dict[str, str]]:
    """The fields of each connection in the answer to CLIENT LIST."""
    for line in clients.decode(errors="replace").splitlines():
        yield dict(field.split("=", 1) for field in line.split(" ") if "=" in field)


def _scheduler(scheduler_id: str, next_ms: int, fields: dict[str, bytes]) -> SchedulerRecord:
    def text(name: str) -> str:
        return fields.get(name, b"").decode(errors="replace")

    def count(name: str) -> int:
        return number(fields.get(name))

    return SchedulerRecord(
        scheduler_id=scheduler_id,
        name=text("name"),
        next_ms=next_ms,
        iterations=count("ic"),
        every=count("every"),
        offset=count("offset"),
        pattern=text("pattern"),
        tz=text("tz"),
        limit=count("limit"),
        start_ms=count("startDate"),
        end_ms=count("endDate"),
        data=json_or_text(fields.get("data")),
        options=unpack_options(fields.get("opts", b"{}")),
    )
