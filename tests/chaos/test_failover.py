"""Primaries that are replaced under load; `python -m tests.chaos failover` has all of it."""

from pathlib import Path

import pytest

from tests.chaos.failover import failover
from tests.chaos.stage import Setup

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("contract", "topology", "replicas", "ways"),
    [
        ("streams", "cluster", 1, ("move slot", "lagging replica")),
        ("omniq", "sentinel", 2, ("lagging replica",)),
    ],
)
async def test_what_enough_replicas_acknowledged_outlives_the_primary(
    tmp_path: Path, contract: str, topology: str, replicas: int, ways: tuple[str, ...]
) -> None:
    setup = Setup(
        folder=tmp_path,
        contract=contract,
        topology=topology,  # type: ignore[arg-type]
        replicas=replicas,
        seed=3,
        workers=2,
    )
    report = await failover(setup, ways=ways)
    assert report.ok, str(report)


async def test_without_replicas_a_lagging_one_loses_acknowledged_jobs_and_the_checker_says_so(
    tmp_path: Path,
) -> None:
    """The harness itself: the same fault must cost something when nothing is waited for."""
    setup = Setup(folder=tmp_path, topology="cluster", replicas=0, seed=3, workers=2, patience_s=8)
    report = await failover(setup, ways=["lagging replica"])
    assert "I1" in report.broken, str(report)
