"""What is read when all is quiet: the journal, the store itself, and how long recovery took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import msgspec

from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import JournalEvent
from tenure.core.registry import open_journal, open_ledger
from tenure.core.seam import Ledger, Query
from tests.chaos.faults import Injected
from tests.chaos.verdict import Observation, Snapshot

PAGE = 2_000
EVENTS_READ_OF_JOBS = 100
# Clients that lost the store, or stood still, need a moment to come back to work.
AFTERMATH_MS = 3_000
REPLACED = ("planned failover", "kill primary", "move slot")
"""Another server has the queue's slot afterwards."""
STORE_FAULTS = ("kill store", "empty store", "cut replicas", *REPLACED)
STARVED = "starved machine"
"""Processes that were ready to run were not run: the machine had other things to do."""
ENDS_OF_A_LEASE = ("complete", "retry", "bury", "snooze", "release", "reap", "cancel")


async def read_journal(url: str) -> list[JournalEvent]:
    """The whole history, page by page."""
    journal = open_journal(url)
    events: list[JournalEvent] = []
    try:
        while page := await journal.read(after=events[-1].seq if events else "", limit=PAGE):
            events += page
    finally:
        await journal.close()
    return events


async def take_snapshot(url: str, rng: Random) -> Snapshot:
    """Every job that the store holds, the counts, and the own events of some of the jobs."""
    ledger = open_ledger(url)
    try:
        records = await _all_records(ledger)
        some = rng.sample(records, min(EVENTS_READ_OF_JOBS, len(records)))
        events: dict[str, list[JobEvent]] = {}
        for record in some:
            events[record.job_id] = await ledger.events(record.job_id)
        return Snapshot(records=records, counts=await ledger.counts(), events=events)
    finally:
        await ledger.close()


async def _all_records(ledger: Ledger) -> list[JobRecord]:
    page = await ledger.find(Query(limit=PAGE))
    records = list(page.jobs)
    while page.after:
        page = await ledger.find(Query(limit=PAGE, after=page.after))
        records += page.jobs
    return records


def read_settles(folder: Path) -> list[Observation]:
    """What stubborn holders were answered."""
    decode = msgspec.json.Decoder(Observation).decode
    return [
        decode(line)
        for path in sorted(folder.glob("settles-*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]


class Held(msgspec.Struct):
    """One lease as the journal tells it; `next_claim_ms` is when the job was claimed again."""

    job_id: str
    fence: int
    worker_id: str
    from_ms: int
    to_ms: int = 0
    ended_by: str = ""
    next_claim_ms: int = 0


def leases_of(events: Sequence[JournalEvent]) -> list[Held]:
    """All leases, in the order of their claims."""
    leases: list[Held] = []
    last: dict[str, Held] = {}
    for event in events:
        before = last.get(event.job_id)
        if event.type == "claim":
            if before is not None:
                before.next_claim_ms = event.ts_ms
            last[event.job_id] = lease = Held(
                event.job_id, event.fence, event.worker_id, event.ts_ms
            )
            leases.append(lease)
        elif before is not None and not before.ended_by and event.type in ENDS_OF_A_LEASE:
            before.to_ms, before.ended_by = event.ts_ms, event.type
    return leases


def recovery_ms(
    events: Sequence[JournalEvent], faults: Sequence[Injected], http_ok_ms: Sequence[int]
) -> dict[str, list[int]]:
    """By kind of fault: from its begin to the next claim of each job that it hit.

    A store has recovered with the first claim after it, a gateway with the first job it takes. What
    a store or the machine was away meanwhile is not the others' fault and is not counted for them.
    """
    leases = leases_of(events)
    claims = [lease.from_ms for lease in leases]
    away = [(f.begin_ms, f.end_ms) for f in faults if f.kind in (*STORE_FAULTS, STARVED)]
    found: dict[str, list[int]] = defaultdict(list)
    for fault in faults:
        match fault.kind:
            case "kill worker" | "stop worker" | "cut network" | "death":
                found[fault.kind] += [
                    lease.next_claim_ms - fault.begin_ms - _away(away, fault, lease)
                    for lease in _hit(leases, fault)
                    if lease.next_claim_ms
                ]
            case "kill store" | "empty store":
                found[fault.kind] += _first_after(claims, fault)
            case "kill gateway":
                found[fault.kind] += _first_after(http_ok_ms, fault)
            case kind if kind in REPLACED:
                found[kind] += _first_claims(leases, fault)
    return dict(found)


def _hit(leases: Sequence[Held], fault: Injected) -> Iterator[Held]:
    for lease in leases:
        held = lease.from_ms <= fault.begin_ms and (not lease.to_ms or lease.to_ms > fault.begin_ms)
        if held and lease.ended_by in ("", "reap") and is_of(lease, fault.workers):
            yield lease


def unexplained(leases: Sequence[Held], faults: Sequence[Injected]) -> list[Held]:
    """I14: leases that ran out although no fault hit their holder or their store meanwhile."""
    return [
        lease
        for lease in leases
        if lease.ended_by == "reap" and not any(_explains(fault, lease) for fault in faults)
    ]


def _explains(fault: Injected, lease: Held) -> bool:
    while_held = fault.begin_ms <= lease.to_ms and fault.end_ms + AFTERMATH_MS >= lease.from_ms
    if fault.kind in (*STORE_FAULTS, STARVED, "blocked worker"):
        return while_held
    if fault.kind.startswith("lost reply"):
        return while_held and lease.worker_id.startswith(f"{fault.target}.")
    return while_held and is_of(lease, fault.workers)


def is_of(lease: Held, workers: Sequence[str]) -> bool:
    """Contracts show a worker's name as it is, or joined with its boot."""
    return lease.worker_id.startswith(tuple(f"{worker}-" for worker in workers)) or (
        lease.worker_id in workers
    )


def outcomes_lost(
    leases: Sequence[Held], faults: Sequence[Injected], ended_ms: Mapping[tuple[str, int], int]
) -> int:
    """Handlers that had finished before the fault, and whose outcome never arrived because of it.

    It went with a worker that was killed, or what it had to reach was away for too long.
    """
    lost = set()
    for fault in faults:
        if fault.kind in ("kill worker", "cut network", "death"):
            by_ms = fault.end_ms
        elif fault.kind in (*STORE_FAULTS, "kill gateway"):
            by_ms = fault.begin_ms  # what still ran is counted by its slot
        else:
            continue
        hit = ((lease.job_id, lease.fence) for lease in _hit(leases, fault))
        lost |= {lease for lease in hit if lease in ended_ms and ended_ms[lease] <= by_ms}
    return len(lost)


def _first_claims(leases: Sequence[Held], fault: Injected) -> list[int]:
    """From the begin of the fault to the first claim of each worker from the server that is left.

    Claims from before its end may be those of the server that was replaced.
    """
    later = [lease for lease in leases if lease.from_ms >= fault.end_ms]
    firsts = (
        next((lease.from_ms for lease in later if is_of(lease, [worker])), 0)
        for worker in fault.workers
    )
    return [ms - fault.begin_ms for ms in firsts if ms]


def _away(away: Sequence[tuple[int, int]], fault: Injected, lease: Held) -> int:
    since, until = fault.begin_ms, lease.next_claim_ms
    return sum(max(0, min(until, end) - max(since, begin)) for begin, end in away)


def _first_after(times: Sequence[int], fault: Injected) -> list[int]:
    later = [ms - fault.begin_ms for ms in times if ms > max(fault.begin_ms, fault.end_ms)]
    return [min(later)] if later else []


def quantile(values: Sequence[int], share: float) -> int:
    """The value below which this share of the values lies (0 of nothing)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0
