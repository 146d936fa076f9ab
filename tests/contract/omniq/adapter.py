"""The `omniq` contract for the conformance suite.

The suite knows one word for a job that waits; OmniQ has two, `wait` and `delayed`. The stage shows
both as `wait`, in the ledger and in the journal alike; OmniQ's own words are tested in this folder.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from leasehold.core.event import JournalEvent
from leasehold.core.job import JobRecord
from leasehold.core.opening import open_journal, open_ledger, open_queue
from leasehold.core.seam import Counts, Journal, Ledger, Page, Query, Queue
from tests.chaos.proxy import LossyProxy
from tests.contract.adapters import Words

_unique = itertools.count(1)
WORDS = Words("wait", "active", "completed", "failed", "failed")
_WAITING = ("wait", "delayed")


class FoldedLedger:
    """A ledger that calls every job that waits `wait`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def get(self, job_id: str) -> JobRecord | None:
        record = await self._ledger.get(job_id)
        return record and _folded(record)

    async def find(self, query: Query) -> Page:
        states = tuple(
            name for state in query.states for name in (_WAITING if state == "wait" else (state,))
        )
        page = await self._ledger.find(msgspec.structs.replace(query, states=states))
        return Page([_folded(record) for record in page.jobs], page.after)

    async def counts(self) -> Counts:
        counts = await self._ledger.counts()
        states = dict(counts.states)
        states["wait"] += states.pop("delayed")
        return msgspec.structs.replace(counts, states=states)


class FoldedJournal:
    """A journal in which every job that waits is in `wait`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    async def read(self, **where: Any) -> list[JournalEvent]:
        return [_told(event) for event in await self._journal.read(**where)]

    async def wait(self, **where: Any) -> list[JournalEvent]:
        return [_told(event) for event in await self._journal.wait(**where)]


def _fold(state: str) -> str:
    return "wait" if state in _WAITING else state


def _folded(record: JobRecord) -> JobRecord:
    return msgspec.structs.replace(record, state=_fold(record.state))


def _told(event: JournalEvent) -> JournalEvent:
    return msgspec.structs.replace(
        event, from_state=_fold(event.from_state), to_state=_fold(event.to_state)
    )


@dataclass
class OmniqStage:
    server_url: str
    query: str
    lease_ms: int
    cannot: Mapping[str, str]
    words: Words = WORDS
    url: str = field(init=False)
    ledger: Any = field(init=False)
    journal: Any = field(init=False)
    _closing: list[Callable[[], Awaitable[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url = f"omniq+{self.server_url}?{self.query}"
        self.ledger = FoldedLedger(open_ledger(self.url))
        self.journal = FoldedJournal(open_journal(self.url))
        self._closing += [self.ledger.close, self.journal.close]

    def queue(self, worker_id: str = "") -> Queue:
        return self._opened(self.url, worker_id)

    async def lossy_queue(self, worker_id: str) -> tuple[Queue, Callable[[], None]]:
        proxy = await LossyProxy(self.server_url).start()
        queue = self._opened(f"omniq+{proxy.url}?{self.query}", worker_id)
        self._closing.append(proxy.stop)
        return queue, partial(proxy.drop_reply, when=_runs_a_script)

    async def advance(self, ms: int) -> None:
        await asyncio.sleep((ms + 5) / 1000)

    async def close(self) -> None:
        for close in self._closing:
            await close()

    def _opened(self, url: str, worker_id: str) -> Queue:
        queue = open_queue(url, worker_id=worker_id)
        self._closing.append(queue.close)
        return queue


def _runs_a_script(command: Any) -> bool:
    return bytes(command[0]).upper() in (b"EVALSHA", b"EVAL")


class OmniqAdapter:
    name = "omniq"
    cannot: Mapping[str, str] = {
        "priority": "OmniQ has no priorities; groups and their limits are its way to share",
        "ttl_before_start": "OmniQ jobs have no time to live before they start",
        "retention": "finished jobs go by count when another one finishes, not by age",
        "token_in_journal": "tokens are made inside the script, which cannot hash them by SHA-256",
    }

    def __init__(self, server_url: Callable[[], str]) -> None:
        self._server_url = server_url

    async def open(self, **options: int) -> OmniqStage:
        options.setdefault("lease_ms", 300)
        options.setdefault("retry_delay_ms", 0)
        names = {"depth_max": "max_depth", "lease_ms": "timeout_ms", "retry_delay_ms": "backoff_ms"}
        query: dict[str, Any] = {names.get(name, name): value for name, value in options.items()}
        query["queue"] = f"suite-{os.getpid()}-{next(_unique)}"
        query["keep_completed"] = 5_000  # the suite looks at more finished jobs than OmniQ keeps
        text = "&".join(f"{name}={value}" for name, value in query.items())
        return OmniqStage(self._server_url(), text, options["lease_ms"], self.cannot)
