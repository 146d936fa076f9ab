"""The reading and steering side of a plane: all its streams, in the contract's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tenure.contracts.plane import MACHINE
from tenure.contracts.plane.model import CONTRACT, STATES, PlaneOptions, attempt_id_of, stream_of
from tenure.core.errors import UsageError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.seam import Counts, LedgerFeatures, Page, Query, WorkerBeat
from tenure.sql.engine import ROW_MACHINE, Engine
from tenure.sql.sql_ledger import SqlLedger

_LEDGER_WORDS = {
    word: tuple(own for own, shown in STATES.items() if shown == word) for word in MACHINE.states
}


class PlaneLedger:
    """The ledger of one plane, for one event loop."""

    def __init__(self, engine: Engine, options: PlaneOptions) -> None:
        self._engine = engine
        self._boxes = {
            name: SqlLedger(engine, options.settings(name), ROW_MACHINE) for name in options.names
        }
        self.default_stream = options.names[0]
        self._first = next(iter(self._boxes.values()))

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures(unfinished=self.unfinished)

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None when there is none (any more)."""
        record = await self._first.get(job_id)
        return record and _told(record)

    async def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """The attempts at a job, oldest first, by their ids; the last may be running."""
        found = await self._first.attempts(job_id)
        return [
            {"attempt_id": attempt_id_of(job_id, each["claim_version"]), **each} for each in found
        ]

    async def find(self, query: Query) -> Page:
        """Jobs by their submits, newest first. A page of several streams is put together."""
        unknown = set(query.states) - set(MACHINE.states)
        if unknown:
            raise UsageError(
                f"no such state: {', '.join(sorted(unknown))}; "
                f"there are {', '.join(MACHINE.states)}",
                contract=CONTRACT,
            )
        states = tuple(own for state in query.states for own in _LEDGER_WORDS[state])
        cursors = _cursors(query.after, list(self._boxes))
        found: list[JobRecord] = []
        nexts: dict[str, str] = {}
        is_cut = False
        # One stream after the other: their positions are one sequence, but a page of each is not.
        for name, box in self._boxes.items():
            if cursors[name] == "-" or len(found) >= query.limit or is_cut:
                nexts[name] = cursors[name]
                continue
            page = await box.find(
                msgspec.structs.replace(
                    query, states=states, after=cursors[name], limit=query.limit - len(found)
                )
            )
            found += [_told(record) for record in page.jobs]
            nexts[name] = page.after or "-"
            is_cut = bool(found and page.after)
        more = any(cursor != "-" for cursor in nexts.values())
        return Page(found, "_".join(nexts.values()) if more else "")

    async def counts(self) -> Counts:
        """Depth by state now, over all streams; paused when all of them are.

        Workers are those of the stream that has most: who serves several is counted in each.
        """
        parts = [await box.counts() for box in self._boxes.values()]
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
        return sum([await box.unfinished(requester, most) for box in self._boxes.values()])

    async def workers(self) -> list[WorkerBeat]:
        """Workers that were heard of lately in any stream."""
        newest: dict[str, WorkerBeat] = {}
        for box in self._boxes.values():
            for beat in await box.workers():
                known = newest.get(beat.worker_id)
                slots = max(beat.slots, known.slots if known else 0)
                last_ms = max(beat.last_ms, known.last_ms if known else 0)
                newest[beat.worker_id] = WorkerBeat(beat.worker_id, last_ms, slots)
        return list(newest.values())

    async def depths(self) -> dict[str, Counts]:
        """The counts of each stream, in the ledger's words."""
        return {name: await box.counts() for name, box in self._boxes.items()}

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The job's own events after a version."""
        record = await self._first.get(job_id)
        box = self._boxes.get(stream_of(record.queue)) if record else None
        if box is None:
            return []
        events = await box.events(job_id, after=after, limit=limit)
        return [
            msgspec.structs.replace(event, type=STATES.get(event.type, event.type))
            for event in events
        ]

    async def pause(self) -> None:
        """Hand out no more leases of any stream."""
        for box in self._boxes.values():
            await box.pause()

    async def resume(self) -> None:
        """Hand out leases again."""
        for box in self._boxes.values():
            await box.resume()

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Begin ended jobs anew; per id "ok", "missing" or the state that forbids it."""
        return await self._steer("retry", job_ids)

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (its worker is told), "missing", or its end."""
        return await self._steer("cancel", job_ids)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok", "missing", or the state of a job that somebody runs."""
        return await self._steer("remove", job_ids)

    async def probe(self) -> None:
        """Raise `StoreError` where the database takes no writes."""
        await next(iter(self._boxes.values())).probe()

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()

    async def _steer(self, verb: str, job_ids: Sequence[str]) -> list[str]:
        """Ask each stream for what the ones before it did not know."""
        said = dict.fromkeys(job_ids, "missing")
        for box in self._boxes.values():
            left = [job_id for job_id, answer in said.items() if answer == "missing"]
            if left:
                said |= dict(zip(left, await getattr(box, verb)(left), strict=True))
        return [STATES.get(said[job_id], said[job_id]) for job_id in job_ids]


def _cursors(after: str, names: list[str]) -> dict[str, str]:
    """Where each stream goes on: a position, "" for its newest, "-" for one that has ended."""
    if not after:
        return dict.fromkeys(names, "")
    parts = after.split("_")
    if len(parts) != len(names) or not all(part in ("", "-") or part.isdecimal() for part in parts):
        raise UsageError(
            f"{after[:80]!r} is not a cursor; pass the `after` of the page before",
            contract=CONTRACT,
        )
    return dict(zip(names, parts, strict=True))


def _told(record: JobRecord) -> JobRecord:
    return msgspec.structs.replace(
        record, queue=stream_of(record.queue), state=STATES[record.state]
    )
