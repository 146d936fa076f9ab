"""The queue over one table of jobs: what a worker needs of the SQL contracts.

Every write of a holder carries the job's id, its claim version and the hash of its token. If they
match no row, the lease was lost.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tenure.core.errors import InvalidTransition, LeaseLost, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import Quarantined, QueueFeatures, Upkeep
from tenure.sql.claim import CLAIM_MAX, SqlClaimer
from tenure.sql.engine import Engine, QueueSettings
from tenure.sql.records import flows_of, schedules_of
from tenure.sql.settle import Delay, Settler, refuse, token_hash
from tenure.sql.submit import submit_jobs
from tenure.sql.upkeep import Upkeeper
from tenure.store.resend import run_step

_STAGES = ("fetching", "processing", "uploading")
_BATCH_MAX = 1_000
_PROGRESS_BYTES_MAX = 64 * 1024  # it is a part of the job, which lists show
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:@-]")


class SqlQueue:
    """The queue of one table, for one event loop. `worker_id` names its claimer.

    `delay` returns after which delay a failed job runs again, `retry_delay_ms_min` the shortest
    delay of a retry that a task asked for. `finals` are the states that a handler cannot report.
    """

    claim_max = CLAIM_MAX
    slots_max = 0

    def __init__(
        self,
        engine: Engine,
        settings: QueueSettings,
        *,
        worker_id: str,
        delay: Delay,
        finals: frozenset[str],
        retry_delay_ms_min: Callable[[Outcome], int] = lambda outcome: 0,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._finals = finals
        self.worker_id = _UNSAFE.sub("-", worker_id)[:200] or f"anon-{secrets.token_hex(6)}"
        self._upkeeper = Upkeeper(engine, settings, self.worker_id)
        self._claimer = SqlClaimer(
            engine,
            settings,
            self.worker_id,
            self._upkeeper.due,
            self._upkeeper.unblock,
            self.settle,
        )
        self._settler = Settler(
            *(engine, settings, delay, self._claimer.start_at_head),
            retry_delay_ms_min=retry_delay_ms_min,
        )

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam.

        On PostgreSQL one settle is processed while another waits for the disk.
        """
        return QueueFeatures(
            lease_ms=self._settings.lease_ms,
            claim_max=self.claim_max,
            slots_max=self.slots_max,
            settles_at_once=2 if self._engine.dialect == "postgres" else 1,
            holds_nul=False,
            take_quarantined=self.take_quarantined,
            contract=self._settings.contract,
            schedules=schedules_of(self._engine, self._settings),
            flows=flows_of(self._engine, self._settings, self.submit),
        )

    @property
    def slots(self) -> int:
        """How many jobs its worker runs at once; 0 while unknown."""
        return self._upkeeper.slots

    @slots.setter
    def slots(self, slots: int) -> None:
        self._upkeeper.slots = slots

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; a known id or idempotency key answers with its job."""
        return await submit_jobs(self._engine, self._settings, jobs)

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases, at most `claim_max`."""
        return await self._claimer.claim(min(limit, self.claim_max), wait_ms=wait_ms)

    def take_quarantined(self) -> list[Quarantined]:
        """The unreadable jobs that were buried since the last call."""
        quarantined, self._claimer.quarantined[:] = list(self._claimer.quarantined), []
        return quarantined

    async def extend(
        self, leases: Sequence[Lease], *, always: bool = False
    ) -> list[Lease | LeaseLost]:
        """Extend leases; without `always` those of which less than two thirds are left."""
        answers: dict[int, Lease | LeaseLost] = {}
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
            for row in await run_step(extend, executed_before=start > 0):
                at = row["n"] - 1
                answers[start + at] = msgspec.structs.replace(
                    chunk[at],
                    lease_until_ms=row["lease_expires_at"],
                    lease_ms=max(1, row["lease_expires_at"] - row["now_ms"]),
                    cancel_requested=bool(row["cancel_requested"]),
                )
        answers |= await self._lost("extend", leases, answers)
        return [answers[at] for at in range(len(leases))]

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Store reports; one of type `stage` moves the job to the stage that its step names."""
        for report in reports:
            self._check(report)
        held: dict[int, str] = {}
        for turn, chunk in enumerate(_batches(reports)):
            stored = self._engine.run(
                self._settings.table,
                "report",
                [_report_row(reports[at]) for at in chunk],
                queue=self._settings.queue,
            )
            for row in await run_step(stored, executed_before=turn > 0):
                at = chunk[row["n"] - 1]
                held[at] = "" if row["becomes"] else f"{row['was']} to {reports[at].step}"
        lost = await self._lost("report", [report.lease for report in reports], held)
        if backwards := list(filter(None, held.values())):
            raise InvalidTransition(
                f"a job cannot go from {backwards[0]}; stages follow each other as "
                f"{', '.join(_STAGES)}",
                contract=self._settings.contract,
            )
        return [lost.get(at) for at in range(len(reports))]

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: job, attempt and journal in one step each."""
        return await self._settler.settle(outcomes)

    async def upkeep(self) -> Upkeep:
        """Promote, reclaim, expire and remove; safe from every worker at any time."""
        done = await self._upkeeper.upkeep()
        if done.promoted or done.reclaimed:
            self._claimer.start_at_head()
        return done

    async def close(self) -> None:
        """Close the connections."""
        await self._claimer.close()
        await self._engine.close()

    async def _lost(
        self, operation: str, leases: Sequence[Lease], held: Mapping[int, object]
    ) -> dict[int, LeaseLost]:
        """The leases that are not held any more, by their position."""
        lost = [at for at in range(len(leases)) if at not in held]
        answers = await refuse(self._engine, self._settings, operation, [leases[at] for at in lost])
        return dict(zip(lost, answers, strict=True))

    def _check(self, report: Report) -> None:
        if report.type in self._finals:
            raise UsageError(
                f"a handler cannot report {report.type!r}: followers stop there; return or raise",
                contract=self._settings.contract,
            )
        if len(report.progress) > _PROGRESS_BYTES_MAX:
            raise UsageError(
                f"a progress of {len(report.progress)} bytes; at most {_PROGRESS_BYTES_MAX} are "
                "stored. Put more into `data`",
                contract=self._settings.contract,
            )
        if report.type == "stage" and report.step not in _STAGES:
            raise UsageError(
                f"there is no stage {report.step!r}; the stages are {', '.join(_STAGES)}",
                contract=self._settings.contract,
            )


def _proof(lease: Lease) -> tuple[str, int, str]:
    return lease.job_id, lease.fence, token_hash(lease.token)


def _report_row(report: Report) -> tuple[object, ...]:
    stage = report.step if report.type == "stage" else ""
    return (
        *_proof(report.lease),
        *(report.type, report.step, report.data.decode(), report.progress.decode(), stage),
    )


def _batches(reports: Sequence[Report]) -> list[list[int]]:
    """Batches for one statement each, in which a move to a stage is its job's only report."""
    batches: list[list[int]] = []
    moved: dict[str, bool] = {}
    for at, report in enumerate(reports):
        job_id, moves = report.lease.job_id, report.type == "stage"
        clash = job_id in moved and (moves or moved[job_id])
        if not batches or clash or len(batches[-1]) >= _BATCH_MAX:
            batches.append([])
            moved = {}
        batches[-1].append(at)
        moved[job_id] = moves or moved.get(job_id, False)
    return batches
