"""Hostile writers in the stores of all contracts, with good jobs beside them."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.garbage import garbage
from tests.chaos.sql_subjects import SQL_SUBJECTS
from tests.chaos.stage import Setup
from tests.chaos.subject import SUBJECTS
from tests.fuzz.budget import SECONDS, SEED, TIMEOUT_S

# 2,400 rounds a minute and contract. More of them would leave a small machine no time for the
# workers of six contracts, and how long a good job waits is measured.
PER_S = 40


@pytest.mark.few
@pytest.mark.timeout(TIMEOUT_S)
async def test_garbage_in_the_stores_loses_doubles_and_delays_no_good_job(tmp_path: Path) -> None:
    """Every contract on every engine, all at the same time."""
    setups = [
        Setup(folder=tmp_path / name, contract=name, seed=SEED, workers=2, lease_ms=2_000)
        for name in sorted({**SUBJECTS, **SQL_SUBJECTS})
    ]
    runs = [garbage(setup, seconds=SECONDS, per_s=PER_S) for setup in setups]
    outcomes = await asyncio.gather(*runs)
    print(*outcomes, sep="\n")
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not failed, "\n".join(failed)
