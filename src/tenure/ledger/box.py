"""A box on the seam: the queue over one table of jobs.

The parts each have a module of their own: `submitting`, `claiming`, `settling`, `upkeeping`. Every
write of a holder carries the job's id, its claim version and the hash of its token; what matches
no row is a lease that was lost, and is told so.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence

import msgspec

from tenure.core.errors import InvalidTransition, LeaseLost, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import Quarantined, Upkeep
from tenure.ledger.claiming import CLAIM_MAX, Claiming
from tenure.ledger.engine import Engine
from tenure.ledger.settings import BoxSettings
from tenure.ledger.settling import Delay, Settling, refuse, token_hash
from tenure.ledger.submitting import Submitting
from tenure.ledger.upkeeping import Upkeeping
from tenure.store.resending import part

STAGES = ("fetching", "processing", "uploading")
_BATCH_MAX = 1_000
_SETTLES_AT_ONCE = 2
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:@-]")


class BoxQueue:
    """The queue of one box, for one event loop. `worker_id` names its claimer.

    `delay` says when a failure is tried again, `least_ms` how long at least where a task said when.
    """

    claim_max = CLAIM_MAX
    holds_nul = False

    def __init__(
        self,
        engine: Engine,
        settings: BoxSettings,
        *,
        worker_id: str,
        delay: Delay,
        finals: frozenset[str],
        least_ms: Callable[[Outcome], int] = lambda outcome: 0,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._finals = finals
        self.worker_id = _UNSAFE.sub("-", worker_id)[:200] or f"anon-{secrets.token_hex(6)}"
        self._submitting = Submitting(engine, settings)
        self._upkeeping = Upkeeping(engine, settings, self.worker_id)
        self._claiming = Claiming(
            engine,
            settings,
            self.worker_id,
            self._upkeeping.due,
            self._upkeeping.unblock,
            self.settle,
        )
        self._settling = Settling(
            engine, settings, delay, self._claiming.from_the_head, least_ms=least_ms
        )

    @property
    def settles_at_once(self) -> int:
        """On PostgreSQL one batch is worked on while another waits for the disk."""
        return _SETTLES_AT_ONCE if self._engine.dialect == "postgres" else 1

    @property
    def lease_ms(self) -> int:
        """How long a lease lasts: a worker that knows it before its first claim waits longer."""
        return self._settings.lease_ms

    @property
    def slots(self) -> int:
        """How many jobs its worker runs at once; 0 while nobody said."""
        return self._upkeeping.slots

    @slots.setter
    def slots(self, slots: int) -> None:
        self._upkeeping.slots = slots

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job it stands for."""
        return await self._submitting.submit(jobs)

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases, at most `claim_max`."""
        return await self._claiming.claim(min(limit, self.claim_max), wait_ms=wait_ms)

    def take_quarantined(self) -> list[Quarantined]:
        """What was set aside since the last call."""
        noted, self._claiming.quarantined[:] = list(self._claiming.quarantined), []
        return noted

    async def extend(
        self, leases: Sequence[Lease], *, always: bool = False
    ) -> list[Lease | LeaseLost]:
        """Keep leases alive; without `always` those of which less than two thirds are left."""
        answers: list[Lease | LeaseLost | None] = [None] * len(leases)
        for start in range(0, len(leases), _BATCH_MAX):
            chunk = leases[start : start + _BATCH_MAX]
            extend = self._engine.run(
                self._settings.table,
                "extend",
                [_proof(lease) for lease in chunk],
                queue=self._settings.queue,
                lease_ms=self._settings.lease_ms,
                always=always,
            )
            rows = await part(start, extend)
            for row in rows:
                at = row["n"] - 1
                answers[start + at] = msgspec.structs.replace(
                    chunk[at],
                    lease_until_ms=row["lease_expires_at"],
                    lease_ms=max(1, row["lease_expires_at"] - row["now_ms"]),
                    cancel_requested=bool(row["cancel_requested"]),
                )
        lost = [at for at, answer in enumerate(answers) if answer is None]
        told = await refuse(self._engine, self._settings, "extend", [leases[at] for at in lost])
        for at, answer in zip(lost, told, strict=True):
            answers[at] = answer
        return [answer for answer in answers if answer is not None]

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Publish news; a report of type `stage` moves the job to the stage that its step names."""
        for report in reports:
            self._check(report)
        answers: list[LeaseLost | None] = [None] * len(reports)
        backwards: list[str] = []
        lost: list[int] = []
        for turn, chunk in enumerate(_rounds(reports)):
            news = self._engine.run(
                self._settings.table,
                "report",
                [_news(reports[at]) for at in chunk],
                queue=self._settings.queue,
            )
            held = {row["n"]: row for row in await part(turn, news)}
            for number, at in enumerate(chunk, 1):
                if number not in held:
                    lost.append(at)
                elif not held[number]["becomes"]:
                    backwards.append(f"{held[number]['was']} to {reports[at].step}")
        told = await refuse(
            self._engine, self._settings, "report", [reports[at].lease for at in lost]
        )
        for at, answer in zip(lost, told, strict=True):
            answers[at] = answer
        if backwards:
            raise InvalidTransition(
                f"a job cannot go from {backwards[0]}; stages follow each other as "
                f"{', '.join(STAGES)}",
                contract=self._settings.contract,
            )
        return answers

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: job, attempt and journal in one step each."""
        return await self._settling.settle(outcomes)

    async def upkeep(self) -> Upkeep:
        """Promote, take back, expire, remove; every worker may do it as often as it likes."""
        done = await self._upkeeping.upkeep()
        if done.promoted or done.reclaimed:
            self._claiming.from_the_head()
        return done

    async def close(self) -> None:
        """Close the connections."""
        await self._claiming.close()
        await self._engine.close()

    def _check(self, report: Report) -> None:
        if report.type in self._finals:
            raise UsageError(
                f"a handler cannot report {report.type!r}: followers stop there; return or raise",
                contract=self._settings.contract,
            )
        if report.type == "stage" and report.step not in STAGES:
            raise UsageError(
                f"there is no stage {report.step!r}; the stages are {', '.join(STAGES)}",
                contract=self._settings.contract,
            )


def _proof(lease: Lease) -> tuple[str, int, str]:
    return lease.job_id, lease.fence, token_hash(lease.token)


def _news(report: Report) -> tuple[object, ...]:
    stage = report.step if report.type == "stage" else ""
    return (
        *_proof(report.lease),
        *(report.type, report.step, report.data.decode(), report.progress.decode(), stage),
    )


def _rounds(reports: Sequence[Report]) -> list[list[int]]:
    """Parts that one statement each can take: a move to a stage is alone of its job there."""
    parts: list[list[int]] = []
    in_part: dict[str, bool] = {}
    for at, report in enumerate(reports):
        job_id, moves = report.lease.job_id, report.type == "stage"
        clash = job_id in in_part and (moves or in_part[job_id])
        if not parts or clash or len(parts[-1]) >= _BATCH_MAX:
            parts.append([])
            in_part = {}
        parts[-1].append(at)
        in_part[job_id] = moves or in_part.get(job_id, False)
    return parts
