"""Reading and steering the jobs of a box, for gateway, dashboard and command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tenure.core.errors import UsageError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.seam import PAGE_BYTES, READ_STEP, Counts, Page, Query, WorkerBeat
from tenure.core.state import Machine
from tenure.ledger.deciding import decide
from tenure.ledger.engine import OUTBOX, Engine, Row
from tenure.ledger.history import SPAN
from tenure.ledger.settings import BoxSettings

_STEP = 500
# One call of `find` looks at no more jobs than this; a rarer state is found page by page.
_SCAN_MAX = 10_000
_BEYOND = 2**62
_POSITION = re.compile(r"[0-9]{1,18}")


class BoxLedger:
    """The ledger of one box, for one event loop."""

    def __init__(self, engine: Engine, settings: BoxSettings, machine: Machine) -> None:
        self.engine = self._engine = engine
        self._settings = settings
        self._machine = machine

    @property
    def settings(self) -> BoxSettings:
        """How the box behaves."""
        return self._settings

    @property
    def is_outbox(self) -> bool:
        """Whether its jobs are events to be delivered."""
        return self._settings.table == OUTBOX

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None when there is none (any more)."""
        rows = await self._engine.run(self._settings.table, "get", job_id=job_id)
        return self._record(rows[0]) if rows else None

    async def pruned(self, job_id: str) -> str | None:
        """Whose job it was, if it was kept long enough and then removed."""
        settings = self._settings
        rows = await self._engine.run(settings.table, "pruned", job_id=job_id, queue=settings.queue)
        return rows[0]["requester_id"] if rows else None

    async def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """The attempts at a job that have ended, oldest first."""
        rows = await self._engine.run(self._settings.table, "attempts", job_id=job_id)
        return [dict(row) for row in rows]

    async def find(self, query: Query) -> Page:
        """Jobs by their submits, newest first; `after` is the position of the last one seen."""
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
            rows = await self._engine.run(
                self._settings.table,
                "find",
                queue=self._settings.queue,
                before=before,
                least=least,
                count=READ_STEP,
            )
            for row in rows:
                before, scanned = row["position"], scanned + 1
                if row["job_id"] is None:
                    continue
                read += len(row["payload"]) + len(row["result"]) + len(row["error"])
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
        """The position below which to look: the end of the journal where it is read in spans."""
        if after or not self.is_outbox:
            return int(after or _BEYOND)
        ends = await self._engine.run(self._settings.table, "journal_end")
        return int(ends[0]["seq"]) + 1

    async def counts(self) -> Counts:
        """Depth by state now."""
        table, queue = self._settings.table, self._settings.queue
        rows = await self._engine.run(table, "counts", queue=queue)
        summary = (await self._engine.run(table, "summary", queue=queue))[0]
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
        table, queue = self._settings.table, self._settings.queue
        asked = {"queue": queue, "requester": requester, "most": most}
        return int((await self._engine.run(table, "unfinished", **asked))[0]["jobs"])

    async def workers(self) -> list[WorkerBeat]:
        """Workers that did upkeep or claimed lately, also in vain."""
        rows = await self._engine.run(self._settings.table, "workers", queue=self._settings.queue)
        return [WorkerBeat(row["worker_id"], row["seen_ms"], row["slots"]) for row in rows]

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The job's own events after a version."""
        rows = await self._engine.run(
            self._settings.table,
            "events",
            queue=self._settings.queue,
            job_id=job_id,
            after=int(after) if _POSITION.fullmatch(after) else 0,
            count=limit,
            bytes=PAGE_BYTES,
        )
        return [_event(row) for row in rows]

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._pause(paused=True)

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._pause(paused=False)

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Begin ended jobs anew; per id "ok", "missing" or the state that forbids it."""
        said = await self._steer("reopen", job_ids, channel=self._engine.channel)
        return ["ok" if state in self._machine.final else state or "missing" for state in said]

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (its worker is told), "missing", or its end."""
        said = await self._steer("cancel", job_ids)
        ended = dict(zip(job_ids, said, strict=True))
        waited = [job_id for job_id, state in ended.items() if state in ("queued", "failed")]
        for start in range(0, len(waited), _STEP):
            await decide(self._engine, self._settings, waited[start : start + _STEP])
        return [self._cancelled(state) for state in said]

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok", "missing", or the state of a job that somebody runs."""
        said = await self._steer("remove", job_ids)
        return [
            state if state in self._machine.running else "ok" if state else "missing"
            for state in said
        ]

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()

    def _cancelled(self, state: str) -> str:
        if state in self._machine.running:
            return "requested"
        return state if state in self._machine.final else "ok" if state else "missing"

    async def probe(self) -> None:
        """Raise `StoreError` where the database takes no writes."""
        await self._engine.run(self._settings.table, "probe", queue=self._settings.queue)

    async def _pause(self, *, paused: bool) -> None:
        await self._engine.run(
            self._settings.table,
            "pause",
            queue=self._settings.queue,
            paused=paused,
            channel=self._engine.channel,
        )

    async def _steer(self, operation: str, job_ids: Sequence[str], **takes: str) -> list[str]:
        """The state in which each job was found; "" for one that is not there."""
        once = list(dict.fromkeys(job_ids))
        found: dict[str, str] = {}
        for start in range(0, len(once), _STEP):
            chunk = once[start : start + _STEP]
            rows = await self._engine.run(
                self._settings.table,
                operation,
                [(job_id,) for job_id in chunk],
                queue=self._settings.queue,
                **takes,
            )
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
            # The errors of earlier attempts stay with these; a job that succeeded has none.
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


def _event(row: Row) -> JobEvent:
    if row["news_type"] is not None:
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
        type=row["to_state"],
        ts_ms=row["ts_ms"],
        step=row["type"],
        data=data,
    )
