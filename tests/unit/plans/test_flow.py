"""What the ids of steps may cost: anybody who may choose the id of a job can name any stage."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.core.job import NewJob, Submitted
from tenure.plans.flow import StoredFlows


class CountedRecords:
    """Records in memory that count the groups which were made to expire."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[str, str]] = {}
        self.expired: list[str] = []

    async def read(self, group: str) -> tuple[int, dict[str, str]]:
        return 0, self.groups.get(group, {})

    async def get(self, group: str, name: str) -> str:
        return self.groups.get(group, {}).get(name, "")

    async def swap(
        self, group: str, name: str, before: str, after: str, *, keep_ms: int = 0
    ) -> bool:
        return self.groups.setdefault(group, {}).setdefault(name, after) == after

    async def size(self, group: str) -> int:
        return len(self.groups.get(group, {}))

    async def expire(self, group: str, keep_ms: int) -> None:
        self.expired.append(group)


async def submit(jobs: Sequence[NewJob]) -> list[Submitted]:
    return [Submitted(job.job_id, "created") for job in jobs]


async def test_a_step_of_a_stage_that_was_never_stored_costs_nothing() -> None:
    records = CountedRecords()
    flows = StoredFlows(records, submit)
    assert await flows.finished("x@99999.0", b"1") == []
    assert records.expired == []


async def test_the_last_step_lets_all_records_of_its_chain_expire() -> None:
    records = CountedRecords()
    flows = StoredFlows(records, submit)
    await flows.start("c", [[NewJob(task=name, payload=b"1")] for name in "abc"])
    for step in ("c@0.0", "c@1.0", "c@2.0"):
        await flows.finished(step, b"1")
    assert records.expired == ["flow:c", "flow:c:0", "flow:c:1"]
    assert {"flow:c", "flow:c:0", "flow:c:1"} == records.groups.keys()
