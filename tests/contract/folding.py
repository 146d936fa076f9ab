"""One word for a job that waits, where a contract has several.

The suite knows one such word. A folded stage shows the others as that one, in the ledger and in the
journal alike; the contract's own words are tested in its own folder.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tenure.core.job import JobRecord
from tenure.core.journal import JournalEvent
from tenure.core.seam import Counts, Journal, Ledger, Page, Query, WorkerBeat
from tests.contract.stages import StoredStage


class Fold:
    """Calls every state of `others` `waiting`."""

    def __init__(self, waiting: str, *others: str) -> None:
        self.waiting = waiting
        self.others = others

    def state(self, name: str) -> str:
        return self.waiting if name in self.others else name

    def record(self, record: JobRecord) -> JobRecord:
        return msgspec.structs.replace(record, state=self.state(record.state))

    def event(self, event: JournalEvent) -> JournalEvent:
        from_state, to_state = self.state(event.from_state), self.state(event.to_state)
        return msgspec.structs.replace(event, from_state=from_state, to_state=to_state)


def folded(stage: StoredStage, *others: str) -> StoredStage:
    """The stage, its ledger and journal folded."""
    fold = Fold(stage.words.waiting, *others)
    stage.ledger = FoldedLedger(stage.ledger, fold)
    stage.journal = FoldedJournal(stage.journal, fold)
    return stage


class FoldedLedger:
    """A ledger with one word for every job that waits."""

    def __init__(self, ledger: Ledger, fold: Fold) -> None:
        self._ledger = ledger
        self._fold = fold

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def workers(self) -> list[WorkerBeat]:
        # Since Python 3.12 a protocol does not see what __getattr__ would find.
        return await self._ledger.workers()

    async def get(self, job_id: str) -> JobRecord | None:
        record = await self._ledger.get(job_id)
        return record and self._fold.record(record)

    async def find(self, query: Query) -> Page:
        states = query.states
        if self._fold.waiting in states:
            states = (*states, *self._fold.others)
        page = await self._ledger.find(msgspec.structs.replace(query, states=states))
        return Page([self._fold.record(record) for record in page.jobs], page.after)

    async def counts(self) -> Counts:
        counts = await self._ledger.counts()
        states = dict(counts.states)
        for name in self._fold.others:
            states[self._fold.waiting] += states.pop(name)
        return msgspec.structs.replace(counts, states=states)


class FoldedJournal:
    """A journal with one word for every job that waits."""

    def __init__(self, journal: Journal, fold: Fold) -> None:
        self._journal = journal
        self._fold = fold

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    async def read(self, **where: Any) -> list[JournalEvent]:
        return [self._fold.event(event) for event in await self._journal.read(**where)]

    async def wait(self, **where: Any) -> list[JournalEvent]:
        return [self._fold.event(event) for event in await self._journal.wait(**where)]
