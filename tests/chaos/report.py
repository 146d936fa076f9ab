"""What a run is judged by, and how it is told: the invariants of the checker and a few of our own.

The journal speaks for the store, log B for the clients, log C for the faults, the effects for the
handlers. Each check names what it counted, so that a pass can be read as well as a failure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tenure.core.encoding import short_hash
from tenure.core.journal import JournalEvent
from tests.chaos.effects import Effect, Effects
from tests.chaos.faults import Injected
from tests.chaos.history import (
    AFTERMATH_MS,
    REPLACED,
    Held,
    is_of,
    outcomes_lost,
    quantile,
    unexplained,
)
from tests.chaos.load import Load
from tests.chaos.verdict import INVARIANTS, Verdict, machine_of

SLACK_MS = 2_000
LONGEST_SEARCH_MS = 1_000
WORKS_AGAIN_WITHIN_MS = 15_000


class Check(msgspec.Struct, frozen=True):
    """A claim about the run, whether it held, and the numbers behind it."""

    claim: str
    ok: bool
    text: str


class Report(msgspec.Struct, kw_only=True):
    """The outcome of one run."""

    scenario: str
    contract: str
    seed: int
    repeat: str
    jobs: int
    seconds: float
    lease_ms: int
    store: str
    faults: dict[str, int]
    counts: dict[str, int]
    invariants: dict[str, int]
    checks: list[Check]
    recovery_ms: dict[str, dict[str, int]]
    journal_sha256: str
    verdict_text: str

    @property
    def ok(self) -> bool:
        """Every invariant and every check held."""
        return not self.broken

    @property
    def broken(self) -> list[str]:
        """What did not hold: numbers of invariants, and claims."""
        numbers = [number for number, count in self.invariants.items() if count]
        return numbers + [check.claim for check in self.checks if not check.ok]

    def as_json(self) -> bytes:
        """For machines."""
        told: dict[str, Any] = {"ok": self.ok, "broken": self.broken, **msgspec.to_builtins(self)}
        return msgspec.json.format(msgspec.json.encode(told), indent=2)

    def __str__(self) -> str:
        outcome = "PASSED" if self.ok else f"FAILED: {', '.join(self.broken)}"
        lines = [
            f"{self.scenario} on {self.contract}: {outcome}",
            f"  seed {self.seed}, {self.jobs} jobs in {self.seconds:.1f} s",
            f"  lease {self.lease_ms} ms, store: {self.store}",
            f"  faults     {_pairs(self.faults)}",
            f"  counts     {_pairs(self.counts)}",
            f"  invariants {_pairs({n: c or 'ok' for n, c in self.invariants.items()})}",
            *(f"  {'ok  ' if c.ok else 'FAIL'} {c.claim}: {c.text}" for c in self.checks),
            *(f"  recovery after {k}: {_pairs(v)} ms" for k, v in self.recovery_ms.items()),
            f"  journal    sha256 {self.journal_sha256[:16]}",
        ]
        if not self.ok:
            lines += ["  " + self.verdict_text, f"  repeat     {self.repeat}"]
        return "\n".join(lines)


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"


def invariants_of(verdict: Verdict) -> dict[str, int]:
    """How often each was violated."""
    found = Counter(violation.invariant for violation in verdict.violations)
    return {number: found[number] for number in INVARIANTS}


def journal_hash(events: Sequence[JournalEvent]) -> str:
    """Two runs with the same hash had the same history."""
    digest = hashlib.sha256()
    for event in events:
        digest.update(msgspec.msgpack.encode(event))
    return digest.hexdigest()


def check_submits(load: Load, events: Sequence[JournalEvent]) -> list[Check]:
    """Nothing that was wanted is missing, nothing is there twice, nothing was invented."""
    stored = [event for event in events if event.type == "submit"]
    lost = load.wanted.keys() - load.acked.keys()
    ids = Counter(load.acked.values())
    doubled = [job_id for job_id, count in ids.items() if count > 1]
    invented = {event.job_id for event in stored} ^ ids.keys()
    hashes = {
        load.acked[key]: short_hash(job.encoded)
        for key, job in load.wanted.items()
        if key in load.acked
    }
    changed = [e.job_id for e in stored if e.payload_h and hashes.get(e.job_id) != e.payload_h]
    return [
        Check(
            "every submit was acknowledged", not lost, f"{len(load.acked)} of {len(load.wanted)}"
        ),
        Check(
            "each was stored once, and nothing else was",
            not doubled and not invented and len(stored) == len(ids),
            f"{len(stored)} stored for {len(ids)} keys, {load.phases['info']} answers lost, "
            f"{load.phases['fail']} never sent, {len(doubled)} doubled, {len(invented)} unknown",
        ),
        Check("each was stored as sent", not changed, f"{len(changed)} payloads differ"),
    ]


def check_starts(
    verdict: Verdict, effects: Effects, faults: Sequence[Injected], leases: Sequence[Held]
) -> list[Check]:
    """A start beyond the first needs a fault that explains it, each for itself and in the sum.

    A slot is free again when its handler has finished, not when the store has the outcome: outcomes
    that were under way when the fault came are counted and shown on their own. A lease that was
    handed back was a claim, and ran nowhere.
    """
    ended_ms = {(effect.job_id, effect.fence): effect.ms for effect in effects.ends}
    failures = verdict.by_type.get("retry", 0)
    unsettled = outcomes_lost(leases, faults, ended_ms)
    bound = sum(fault.slots for fault in faults) + failures + unsettled
    handed_back = verdict.by_type.get("release", 0)
    ran = len(effects.starts) - len({effect.job_id for effect in effects.starts})
    return [
        _check_reaped(leases, faults),
        Check(
            "starts beyond the first stay within what the faults can cost",
            ran <= bound and verdict.duplicate_starts - handed_back <= bound,
            f"{verdict.duplicate_starts} more claims ({handed_back} handed back) and {ran} more "
            f"handler starts than jobs, at "
            f"most {bound} = faults x concurrency + {failures} failures + {unsettled} outcomes "
            "that were under way and lost",
        ),
    ]


def _check_reaped(leases: Sequence[Held], faults: Sequence[Injected]) -> Check:
    odd = unexplained(leases, faults)
    reaped = sum(lease.ended_by == "reap" for lease in leases)
    return Check(
        "every lease that ran out had a fault behind it",
        not odd,
        f"{reaped} ran out, {len(odd)} for no reason {[lease.job_id for lease in odd[:3]]}",
    )


def check_starts_again(
    effects: Effects, faults: Sequence[Injected], leases: Sequence[Held]
) -> list[Check]:
    """Where a replica was promoted, each start beyond a job's first has a fault before it.

    The replica may not know of the job's last claim, or of its end a moment before the fault.
    """
    ended_ms = {(e.job_id, e.fence, e.worker_id): e.ms for e in effects.ends}
    last: dict[str, Effect] = {}
    again, odd = 0, []
    for start in sorted(effects.starts, key=lambda effect: effect.ms):
        before = last.get(start.job_id)
        last[start.job_id] = start
        if before is None:
            continue
        again += 1
        until_ms = ended_ms.get((before.job_id, before.fence, before.worker_id), start.ms)
        if not any(
            fault.begin_ms <= until_ms + AFTERMATH_MS
            and fault.begin_ms <= start.ms
            and before.ms <= fault.end_ms + AFTERMATH_MS
            for fault in faults
        ):
            odd.append(start.job_id)
    return [
        _check_reaped(leases, faults),
        Check(
            "a job ran again only where a fault came between",
            not odd,
            f"{again} more starts than jobs, {len(odd)} for no reason {odd[:3]}",
        ),
    ]


def check_replaced(recovery: Mapping[str, list[int]], faults: Sequence[Injected]) -> Check:
    """Every worker has work again within 15 s after each time that a server was replaced."""
    struck = [fault for fault in faults if fault.kind in REPLACED]
    times = [ms for kind in REPLACED for ms in recovery.get(kind, ())]
    wanted = sum(len(fault.workers) for fault in struck)
    return Check(
        "every worker works again in time after each fault",
        bool(struck) and len(times) == wanted and max(times) <= WORKS_AGAIN_WITHIN_MS,
        f"{len(times)} of {wanted}, at most {max(times, default=0)} ms of {WORKS_AGAIN_WITHIN_MS}",
    )


def check_lagged(effects: Effects, leases: Sequence[Held], faults: Sequence[Injected]) -> Check:
    """A replica that lagged behind knows nothing of some of the work: else nothing was at stake."""
    known = {(lease.job_id, lease.fence): lease for lease in leases}
    unknown = [
        start
        for start in effects.starts
        if (lease := known.get((start.job_id, start.fence))) is None
        or not is_of(lease, [start.worker_id])
    ]
    cut = sum(fault.kind == "cut replicas" for fault in faults)
    return Check(
        "replicas that lagged were promoted without some of the work",
        bool(unknown) or not cut,
        f"{len(unknown)} handler starts that the promoted replicas did not know, {cut} cuts",
    )


def check_effects(events: Sequence[JournalEvent], effects: Effects) -> Check:
    """A job is done because a handler did it, under that very fence."""
    did = {(effect.job_id, effect.fence) for effect in effects.ends}
    completed = [(event.job_id, event.fence) for event in events if event.type == "complete"]
    idle = [pair for pair in completed if pair not in did]
    return Check(
        "every completion had a handler behind it",
        not idle and bool(completed),
        f"{len(completed)} completions, {len(idle)} that no handler finished",
    )


def check_ends(contract: str, events: Sequence[JournalEvent], expected: Mapping[str, int]) -> Check:
    """The jobs ended as planned: so many in each final state."""
    last = {event.job_id: event.to_state for event in events if event.ver}
    final = Counter(state for state in last.values() if state in machine_of(contract).final)
    wanted = {state: count for state, count in expected.items() if count}
    return Check("the jobs ended as planned", dict(final) == wanted, _pairs(final))


def check_residue(residue: Mapping[str, int]) -> Check:
    """The queue holds nothing any more."""
    return Check("the queue is empty", not any(residue.values()), _pairs(residue))


def check_faults(
    faults: Sequence[Injected], planned: Mapping[str, int], events: Sequence[JournalEvent]
) -> Check:
    """The faults happened, and while there was work: a chaos run without chaos proves nothing."""
    last_ms = max(
        (event.ts_ms for event in events if event.type in ("complete", "bury")), default=0
    )
    under_load = Counter(fault.kind for fault in faults if fault.begin_ms < last_ms)
    missing = {k: n - under_load[k] for k, n in planned.items() if under_load[k] < n}
    text = f"{_pairs(under_load)}" + (f"; missing: {_pairs(missing)}" if missing else "")
    return Check("the planned faults struck under load", not missing, text)


def check_recovery(
    recovery: Mapping[str, list[int]], lease_ms: int, planned: Mapping[str, int]
) -> Check:
    """I15: what a dead or stopped worker held is claimed again within lease + search + 2 s.

    Faults that hit nobody at work prove nothing, so somebody must have been hit.
    """
    bound = lease_ms + LONGEST_SEARCH_MS + SLACK_MS
    kinds = ("kill worker", "stop worker", "cut network", "death")
    times = [ms for kind in kinds for ms in recovery.get(kind, ())]
    p99 = quantile(times, 0.99)
    return Check(
        "jobs of dead and stopped workers were claimed again in time",
        p99 <= bound and (bool(times) or not planned.keys() & set(kinds)),
        f"{len(times)} jobs hit, p99 {p99} ms of at most {bound}",
    )


def recovery_table(recovery: Mapping[str, list[int]]) -> dict[str, dict[str, int]]:
    """Median, 99th percentile and maximum by kind of fault."""
    return {
        kind: {
            "jobs": len(times),
            "p50": quantile(times, 0.5),
            "p99": quantile(times, 0.99),
            "max": max(times, default=0),
        }
        for kind, times in recovery.items()
    }
