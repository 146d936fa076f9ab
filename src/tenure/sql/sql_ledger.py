"""The ledger and the journal of one table of jobs, and the readers of the journal."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tenure.core.errors import NotFound, UsageError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import JournalEvent
from tenure.core.seam import (
    NOW,
    PAGE_BYTES,
    READ_STEP,
    Counts,
    LedgerFeatures,
    Page,
    Query,
    WorkerBeat,
)
from tenure.core.state import Machine
from tenure.sql.engine import OUTBOX, Engine, QueueSettings, Row
from tenure.sql.records import schedules_of
from tenure.sql.settle import decide

_WAIT_MS = 250
# The history of an outbox is among the steps of its jobs, millions of which may have no event. Read
# at most SPAN positions per query.
SPAN = 50_000
# A position given as a time. Writers of the same moment may commit in any order.
_TIME_PREFIX = "@"
_DISORDER_MS = 5_000
_STEP = 500
# One call of `find` reads no more jobs than this, so a page may be short or empty.
_SCAN_MAX = 10_000
_AFTER_NEWEST = 2**62
_ATTEMPTS_MAX = 100
_WEIGHED = ("payload", "result", "error", "progress")
_POSITION = re.compile(r"[0-9]{1,18}")
EVENT_FIELDS = (
    *("ver", "task", "from_state", "to_state", "attempt", "fence", "prev_fence", "token_h"),
    *("worker_id", "lease_until_ms", "prev_lease_until_ms", "gid", "priority", "due_ms"),
    *("max_attempts", "error_code", "payload_h", "result_h", "data"),
)


class SqlJournal:
    """The journal of one queue. Positions are rising numbers."""

    def __init__(self, engine: Engine, settings: QueueSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._listener = engine.journal_listener(settings.queue)
        self._empty: dict[int, int] = {}

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a position, oldest first."""
        after = await self._position(after)
        if after and not after.isdecimal():
            raise UsageError(
                f"{after!r} is not a position of this journal", contract=self._settings.contract
            )
        rows = await self._rows(int(after or 0), await self._engine.settled_position(), limit)
        return [_journal_event(row, self._settings.contract) for row in rows]

    async def _rows(self, after: int, upto: int, limit: int) -> list[Row]:
        settings, rows = self._settings, list[Row]()
        at = max(after, self._empty.get(after, 0))
        while at < upto and len(rows) < limit:
            end = min(upto, at + SPAN) if settings.table == OUTBOX else upto
            rows += await self._engine.run(
                *(settings.table, "journal"),
                queue=settings.queue,
                after=at,
                upto=end,
                count=limit - len(rows),
            )
            at = end
        # A caller that waits reads again from the same position: skip what was empty.
        self._empty = {} if rows else {after: at}
        return rows

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but waits for the first event; `after` may be `NOW`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        if after == NOW:
            after = str(await self._engine.settled_position())
        after = await self._position(after)
        while True:
            await self.arm()
            events = await self.read(after=after)
            left_ms = round((deadline - loop.time()) * 1000)
            if events or left_ms <= 0:
                return events
            await self.notified(min(left_ms, _WAIT_MS))

    async def arm(self) -> None:
        """Listen from now on."""
        await self._listener.arm()

    async def notified(self, wait_ms: int) -> None:
        """Return when there may be news, at the latest after `wait_ms`."""
        await self._listener.wait(wait_ms)

    async def stop_listening(self) -> None:
        """Listen for nothing any more; the connections stay open."""
        await self._listener.close()

    async def last(self) -> str:
        """The position up to which no open transaction can still add an event."""
        return str(await self._engine.settled_position())

    def since(self, ts_ms: int) -> str:
        """A cursor before every event since this time, and before some earlier ones."""
        return f"{_TIME_PREFIX}{ts_ms}"

    async def _position(self, after: str) -> str:
        """`after` as a number; a time is found by bisection, since `ts_ms` rises with `seq`."""
        if not after.startswith(_TIME_PREFIX):
            return after
        target_ms = int(after.removeprefix(_TIME_PREFIX)) - _DISORDER_MS
        low, high = 0, await self._engine.settled_position()
        at = high
        while low < high:
            rows = await self._engine.run(
                self._settings.table, "journal_at", queue=self._settings.queue, seq=at
            )
            if not rows or rows[0]["ts_ms"] < target_ms:
                low = at
            else:
                high = rows[0]["seq"] - 1
            at = (low + high + 1) // 2
        return str(low)

    async def close(self) -> None:
        """Close the connections."""
        await self.stop_listening()
        await self._engine.close()


def _journal_event(row: Row, contract: str) -> JournalEvent:
    return JournalEvent(
        seq=str(row["seq"]),
        contract=contract,
        queue=row["queue"],
        job_id=row["job_id"],
        type=row["type"],
        ts_ms=row["ts_ms"],
        **{name: row[name] for name in EVENT_FIELDS},
    )


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """A reader of a queue's journal: its position, and when it last reported it."""

    queue: str
    name: str
    position: int
    seen_ms: int


class JournalReaders:
    """The readers that capture the journal of some queues.

    Unread events are not trimmed before `unread_days`. A reader reports its position after it has
    stored the events: if it dies in between, it reads some again and misses none.
    """

    def __init__(self, engine: Engine, queues: Sequence[str]) -> None:
        self._engine = engine
        self._queues = queues

    async def note(self, name: str, position: int) -> None:
        """Store that a reader has captured everything up to this position."""
        for queue in self._queues:
            await self._engine.run(OUTBOX, "reader_note", queue=queue, name=name, position=position)

    async def forget(self, name: str) -> None:
        """Remove a reader, so that the journal is trimmed without waiting for it."""
        removed = [
            row
            for queue in self._queues
            for row in await self._engine.run(OUTBOX, "reader_forget", queue=queue, name=name)
        ]
        if not removed:
            raise NotFound(f"{name} is no reader of this journal; {await self._known()}")

    async def all(self) -> list[Reader]:
        """By queue and name."""
        return [
            Reader(queue=queue, name=row["name"], position=row["position"], seen_ms=row["seen_ms"])
            for queue in self._queues
            for row in await self._engine.run(OUTBOX, "reader_list", queue=queue)
        ]

    async def _known(self) -> str:
        names = sorted({reader.name for reader in await self.all()})
        return f"it has {', '.join(names)}" if names else "nobody captures it"


class SqlLedger:
    """The ledger of one queue, for one event loop; `names` are what events call its states."""

    def __init__(
        self,
        engine: Engine,
        settings: QueueSettings,
        machine: Machine,
        *,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = self._engine = engine
        self._settings = settings
        self._machine = machine
        self._names = names or {}

    @property
    def settings(self) -> QueueSettings:
        """The settings of the queue."""
        return self._settings

    @property
    def is_outbox(self) -> bool:
        """Whether its jobs are events to be delivered."""
        return self._settings.table == OUTBOX

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures(
            is_outbox=self.is_outbox,
            unfinished=self.unfinished,
            schedules=schedules_of(self._engine, self._settings),
        )

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None when there is none (any more)."""
        rows = await self._run("get", job_id=job_id)
        return self._record(rows[0]) if rows else None

    async def pruned(self, job_id: str) -> str | None:
        """The requester of a job that was removed after its retention time."""
        rows = await self._run("pruned", job_id=job_id)
        return rows[0]["requester_id"] if rows else None

    async def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """The newest attempts at a job that have ended, oldest first."""
        rows = await self._run("attempts", job_id=job_id, count=_ATTEMPTS_MAX, bytes=PAGE_BYTES)
        return [dict(row) for row in rows]

    async def find(self, query: Query) -> Page:
        """Jobs newest first by their submits; `after` is the position of the last one seen."""
        unknown = set(query.states) - set(self._machine.states)
        if unknown:
            raise UsageError(
                f"no such state: {', '.join(sorted(unknown))}; "
                f"there are {', '.join(self._machine.states)}",
                contract=self._settings.contract,
            )
        if query.after and not _POSITION.fullmatch(query.after):
            raise UsageError(
                f"{query.after!r} is not a cursor; pass the `after` of the page before",
                contract=self._settings.contract,
            )
        before, scanned, read = await self._begin(query.after), 0, 0
        found: list[JobRecord] = []
        while scanned < _SCAN_MAX:
            least = max(0, before - SPAN) if self.is_outbox else 0
            rows = await self._run("find", before=before, least=least, count=READ_STEP)
            for row in rows:
                before, scanned = row["position"], scanned + 1
                if row["job_id"] is None:
                    continue
                read += sum(len(row[name]) for name in _WEIGHED)
                if _matches(row, query):
                    found.append(self._record(row))
                if len(found) >= query.limit or read >= PAGE_BYTES:
                    return Page(found, str(before))
            if len(rows) < READ_STEP:
                if not least:
                    return Page(found)
                before, scanned = least, scanned + _STEP
        return Page(found, str(before))

    async def _begin(self, after: str) -> int:
        """The position to read down from; for an outbox the end of the journal."""
        if after or not self.is_outbox:
            return int(after or _AFTER_NEWEST)
        return int((await self._run("journal_end"))[0]["seq"]) + 1

    async def counts(self) -> Counts:
        """Depth by state now."""
        rows = await self._run("counts")
        (summary,) = await self._run("summary")
        states = dict.fromkeys(self._machine.states, 0)
        states |= {row["status"]: row["jobs"] for row in rows}
        oldest_ms = summary["oldest_ms"]
        return Counts(
            states=states,
            totals=states,
            paused=bool(summary["paused"]),
            workers=summary["workers"],
            oldest_waiting_ms=max(0, summary["now_ms"] - oldest_ms) if oldest_ms else 0,
        )

    async def unfinished(self, requester: str, most: int) -> int:
        """How many jobs of a requester have not ended, counted up to `most`."""
        (row,) = await self._run("unfinished", requester=requester, most=most)
        return int(row["jobs"])

    async def workers(self) -> list[WorkerBeat]:
        """Workers that claimed or did upkeep lately."""
        rows = await self._run("workers")
        return [WorkerBeat(row["worker_id"], row["seen_ms"], row["slots"]) for row in rows]

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The job's own events after a version."""
        from_version = int(after) if _POSITION.fullmatch(after) else 0
        rows = await self._run(
            "events", job_id=job_id, after=from_version, count=limit, bytes=PAGE_BYTES
        )
        return [_job_event(row, self._names) for row in rows]

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._run("pause", paused=True, channel=self._engine.channel)

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._run("pause", paused=False, channel=self._engine.channel)

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Restart ended jobs; per id "ok", "missing" or the state that forbids it."""
        states = await self._manage("reopen", job_ids, channel=self._engine.channel)
        return ["ok" if state in self._machine.final else state or "missing" for state in states]

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (it runs), "missing", or its final state."""
        states = await self._manage("cancel", job_ids)
        found = dict(zip(job_ids, states, strict=True))
        waiting = [job_id for job_id, state in found.items() if state in ("queued", "failed")]
        for start in range(0, len(waiting), _STEP):
            await decide(self._engine, self._settings, waiting[start : start + _STEP])
        return [self._cancelled(state) for state in states]

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok", "missing", or the state of a job that runs."""
        states = await self._manage("remove", job_ids)
        return [
            state if state in self._machine.running else "ok" if state else "missing"
            for state in states
        ]

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()

    def _cancelled(self, state: str) -> str:
        if state in self._machine.running:
            return "requested"
        return state if state in self._machine.final else "ok" if state else "missing"

    async def probe(self) -> None:
        """Raise `StoreError` if the database accepts no writes."""
        await self._run("probe")

    async def _run(
        self, operation: str, batch: Sequence[Sequence[Any]] = (), **params: Any
    ) -> Sequence[Row]:
        settings = self._settings
        return await self._engine.run(
            settings.table, operation, batch, queue=settings.queue, **params
        )

    async def _manage(self, operation: str, job_ids: Sequence[str], **params: str) -> list[str]:
        """The state in which each job was found; "" if it does not exist."""
        once = list(dict.fromkeys(job_ids))
        found: dict[str, str] = {}
        for start in range(0, len(once), _STEP):
            chunk = once[start : start + _STEP]
            rows = await self._run(operation, [(job_id,) for job_id in chunk], **params)
            found |= {chunk[row["n"] - 1]: row["was"] for row in rows}
        return [found.get(job_id, "") for job_id in job_ids]

    def _record(self, row: Row) -> JobRecord:
        extra: dict[str, Any] = {"cancel_requested": True} if row["cancel_requested"] else {}
        counters = ("lost_count", "credential_refresh_count", "event_count", "credential_version")
        extra |= {name: row[name] for name in counters if row[name]}
        if row["status_webhook_url"]:
            extra["status_webhook_url"] = row["status_webhook_url"]
        return JobRecord(
            job_id=row["job_id"],
            contract=self._settings.contract,
            queue=row["queue"],
            task=row["task"],
            state=row["status"],
            payload=row["payload"].encode(),
            result=row["result"].encode(),
            # The column keeps the error of an earlier attempt; a job that succeeded shows none.
            error=b"" if row["status"] == "succeeded" else row["error"].encode(),
            attempt=row["attempt_count"],
            max_attempts=row["max_attempts"],
            fence=row["claim_version"],
            created_ms=row["created_ms"],
            updated_ms=row["updated_ms"],
            due_ms=max(0, row["due_ms"]),
            lease_until_ms=row["lease_expires_at"],
            ttl_ms=max(0, row["expires_ms"] - row["created_ms"]) if row["expires_ms"] else 0,
            priority=row["priority"],
            gid=row["gid"],
            worker_id=row["worker_id"],
            requester=row["requester_id"],
            progress=row["progress"].encode(),
            trace=row["trace"],
            extra=extra,
        )


def _matches(row: Row, query: Query) -> bool:
    return (not query.states or row["status"] in query.states) and (
        not query.task or row["task"] == query.task
    )


def _job_event(row: Row, names: Mapping[str, str]) -> JobEvent:
    if row["news_type"] is not None:  # a report: the columns `news*` hold its type, step and data
        return JobEvent(
            event_id=str(row["ver"]),
            type=row["news_type"],
            ts_ms=row["ts_ms"],
            step=row["news_step"],
            data=row["news"].encode(),
        )
    data = b'{"attempt":%d}' % row["attempt"]
    return JobEvent(
        event_id=str(row["ver"]),
        type=names.get(row["to_state"], row["to_state"]),
        ts_ms=row["ts_ms"],
        step=row["type"],
        data=data,
    )
