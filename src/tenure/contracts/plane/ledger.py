"""The ledger and the journal of a plane: all its streams, with the contract's states."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from tenure.contracts.plane import MACHINE
from tenure.contracts.plane.model import (
    CONTRACT,
    STATES,
    PlaneOptions,
    attempt_id_of,
    queue_of,
    stream_of,
)
from tenure.contracts.plane.news import NewsTail
from tenure.core.errors import UsageError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import JournalEvent, SqlFormat
from tenure.core.seam import NOW, Counts, LedgerFeatures, Page, Query, WorkerBeat
from tenure.sql.engine import PLANE, ROW_MACHINE, Engine
from tenure.sql.sql_ledger import EVENT_FIELDS, SqlJournal, SqlLedger

_POLL_MS = 250
_SQL_STATES = {
    state: tuple(own for own, shown in STATES.items() if shown == state) for state in MACHINE.states
}


class PlaneLedger:
    """The ledger of one plane, for one event loop."""

    def __init__(self, engine: Engine, options: PlaneOptions) -> None:
        self._engine = engine
        self._ledgers = {
            name: SqlLedger(engine, options.settings(name), ROW_MACHINE, names=STATES)
            for name in options.names
        }
        self.default_stream = options.names[0]
        self.news = NewsTail(PlaneJournal(engine, options), self.requesters)
        self._first = next(iter(self._ledgers.values()))

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures(unfinished=self.unfinished, schedules=self._first.features.schedules)

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None when there is none (any more)."""
        record = await self._first.get(job_id)
        return record and _translate_record(record)

    async def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """The attempts at a job, oldest first, by their ids; the last may be running."""
        found = await self._first.attempts(job_id)
        return [
            {"attempt_id": attempt_id_of(job_id, each["claim_version"]), **each} for each in found
        ]

    async def requesters(self, job_ids: Collection[str]) -> dict[str, str]:
        """Whose jobs these are, of those that exist."""
        if not job_ids:
            return {}
        rows = await self._engine.run(PLANE, "plane_leases", [(job_id,) for job_id in job_ids])
        return {row["job_id"]: row["requester_id"] for row in rows}

    async def find(self, query: Query) -> Page:
        """Jobs newest first within a stream, one stream after the other."""
        unknown = set(query.states) - set(MACHINE.states)
        if unknown:
            raise UsageError(
                f"no such state: {', '.join(sorted(unknown))}; "
                f"there are {', '.join(MACHINE.states)}",
                contract=CONTRACT,
            )
        states = tuple(own for state in query.states for own in _SQL_STATES[state])
        cursors = _cursors(query.after, list(self._ledgers))
        found: list[JobRecord] = []
        nexts: dict[str, str] = {}
        is_cut = False
        for name, ledger in self._ledgers.items():
            if cursors[name] == "-" or len(found) >= query.limit or is_cut:
                nexts[name] = cursors[name]
                continue
            page = await ledger.find(
                msgspec.structs.replace(
                    query, states=states, after=cursors[name], limit=query.limit - len(found)
                )
            )
            found += [_translate_record(record) for record in page.jobs]
            nexts[name] = page.after or "-"
            is_cut = bool(found and page.after)
        more = any(cursor != "-" for cursor in nexts.values())
        return Page(found, "_".join(nexts.values()) if more else "")

    async def counts(self) -> Counts:
        """Depth by state now, over all streams; paused when all of them are.

        `workers` is the maximum over the streams, because a worker of several is counted in each.
        """
        parts = [await ledger.counts() for ledger in self._ledgers.values()]
        states = dict.fromkeys(MACHINE.states, 0)
        for part in parts:
            for own, count in part.states.items():
                states[STATES[own]] += count
        return Counts(
            states=states,
            totals=states,
            paused=all(part.paused for part in parts),
            workers=max(part.workers for part in parts),
            oldest_waiting_ms=max(part.oldest_waiting_ms for part in parts),
        )

    async def unfinished(self, requester: str, most: int) -> int:
        """How many jobs of a requester have not ended in any stream, up to `most` in each."""
        return sum([await ledger.unfinished(requester, most) for ledger in self._ledgers.values()])

    async def workers(self) -> list[WorkerBeat]:
        """Workers that were active lately in any stream."""
        newest: dict[str, WorkerBeat] = {}
        for ledger in self._ledgers.values():
            for beat in await ledger.workers():
                known = newest.get(beat.worker_id)
                slots = max(beat.slots, known.slots if known else 0)
                last_ms = max(beat.last_ms, known.last_ms if known else 0)
                newest[beat.worker_id] = WorkerBeat(beat.worker_id, last_ms, slots)
        return list(newest.values())

    async def depths(self) -> dict[str, Counts]:
        """The counts of each stream, with the states of the SQL tables."""
        return {name: await ledger.counts() for name, ledger in self._ledgers.items()}

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The job's own events after a version."""
        record = await self._first.get(job_id)
        ledger = self._ledgers.get(stream_of(record.queue)) if record else None
        return await ledger.events(job_id, after=after, limit=limit) if ledger else []

    async def pause(self) -> None:
        """Hand out no more leases of any stream."""
        for ledger in self._ledgers.values():
            await ledger.pause()

    async def resume(self) -> None:
        """Hand out leases again."""
        for ledger in self._ledgers.values():
            await ledger.resume()

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Begin ended jobs anew; per id "ok", "missing" or the state that forbids it."""
        return await self._apply("retry", job_ids)

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (it runs), "missing", or its final state."""
        return await self._apply("cancel", job_ids)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok", "missing", or the state of a job that runs."""
        return await self._apply("remove", job_ids)

    async def probe(self) -> None:
        """Raise `StoreError` where the database takes no writes."""
        await next(iter(self._ledgers.values())).probe()

    async def close(self) -> None:
        """Close the connections."""
        await self.news.close()
        await self._engine.close()

    async def _apply(self, operation: str, job_ids: Sequence[str]) -> list[str]:
        """Try each stream for the jobs that the streams before it do not have."""
        answers = dict.fromkeys(job_ids, "missing")
        for ledger in self._ledgers.values():
            left = [job_id for job_id, answer in answers.items() if answer == "missing"]
            if left:
                answers |= dict(zip(left, await getattr(ledger, operation)(left), strict=True))
        return [STATES.get(answers[job_id], answers[job_id]) for job_id in job_ids]


def _cursors(after: str, names: list[str]) -> dict[str, str]:
    """The cursor of each stream: a position, "" for its newest job, "-" at its end."""
    if not after:
        return dict.fromkeys(names, "")
    parts = after.split("_")
    if len(parts) != len(names) or not all(part in ("", "-") or part.isdecimal() for part in parts):
        raise UsageError(
            f"{after[:80]!r} is not a cursor; pass the `after` of the page before",
            contract=CONTRACT,
        )
    return dict(zip(names, parts, strict=True))


def _translate_record(record: JobRecord) -> JobRecord:
    return msgspec.structs.replace(
        record, queue=stream_of(record.queue), state=STATES[record.state]
    )


class PlaneJournal:
    """The events of all streams in the order in which the database numbered them."""

    def __init__(self, engine: Engine, options: PlaneOptions) -> None:
        self._engine = engine
        self._journals = [SqlJournal(engine, options.settings(name)) for name in options.names]

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a position, oldest first."""
        if len(self._journals) == 1:
            events = await self._journals[0].read(after=after, limit=limit)
            return [_translate_event(event) for event in events]
        # Ignore what is written while we read: the streams read first would lack it.
        end = await self._engine.settled_position()
        merged = [
            event
            for journal in self._journals
            for event in await journal.read(after=after, limit=limit)
            if int(event.seq) <= end
        ]
        merged.sort(key=lambda event: int(event.seq))
        return [_translate_event(event) for event in merged[:limit]]

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but waits for the first event; `after` may be `NOW`."""
        if len(self._journals) == 1:
            events = await self._journals[0].wait(after=after, wait_ms=wait_ms)
            return [_translate_event(event) for event in events]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        if after == NOW:
            after = str(await self._engine.settled_position())
        while True:
            for journal in self._journals:
                await journal.arm()
            events = await self.read(after=after)
            left_ms = round((deadline - loop.time()) * 1000)
            if events or left_ms <= 0:
                return events
            await self._wait_any(min(left_ms, _POLL_MS))

    async def _wait_any(self, wait_ms: int) -> None:
        """Return when one of the streams may have news."""
        waits = [asyncio.ensure_future(each.notified(wait_ms)) for each in self._journals]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def last(self) -> str:
        """The position up to which no open transaction can still add an event."""
        return str(await self._engine.settled_position())

    def since(self, ts_ms: int) -> str:
        """A cursor before every event since this time, and before some earlier ones."""
        return self._journals[0].since(ts_ms)

    async def stop_listening(self) -> None:
        """Listen for nothing any more; the connections stay open."""
        for journal in self._journals:
            await journal.stop_listening()

    async def close(self) -> None:
        """Close the connections."""
        for journal in self._journals:
            await journal.close()


def _translate_event(event: JournalEvent) -> JournalEvent:
    return msgspec.structs.replace(
        event,
        queue=stream_of(event.queue),
        from_state=STATES[event.from_state],
        to_state=STATES[event.to_state],
    )


def journal_table(store: str, options: PlaneOptions) -> SqlFormat:
    """The table of the journal; it is trimmed only up to what its readers have captured."""
    schema = f"{options.schema}." if store.startswith("postgres") else ""
    queues = ", ".join(f"'{queue_of(name)}'" for name in options.names)
    return SqlFormat(
        store=store,
        table=f"{schema}job_journal",
        contract=CONTRACT,
        queue=",".join(options.names),
        fields=("queue", "job_id", "type", "ts_ms", *EVENT_FIELDS),
        where=f"queue IN ({queues})",
        sequence=f"{schema}job_journal_seq_seq" if schema else "job_journal",
        states=tuple(STATES.items()),
        queue_prefix=queue_of(""),
        jobs=f"{schema}{PLANE}",
        queues=tuple(queue_of(name) for name in options.names),
        schema=options.schema,
        by_job="n.listed" if schema else "true",
    )
