"""A hostile writer in the store, on every contract and every engine."""

from pathlib import Path

import pytest

from tests.chaos.garbage import garbage
from tests.chaos.sql_subjects import SQL_SUBJECTS
from tests.chaos.stage import Setup
from tests.chaos.subject import SUBJECTS

# Delays are measured.
pytestmark = pytest.mark.alone


@pytest.mark.parametrize("contract", sorted({**SUBJECTS, **SQL_SUBJECTS}))
async def test_garbage_in_the_store_loses_doubles_and_delays_no_good_job(
    tmp_path: Path, contract: str
) -> None:
    setup = Setup(folder=tmp_path, contract=contract, seed=11, jobs=300, workers=2, lease_ms=2_000)
    outcome = await garbage(setup, rounds=200)
    assert outcome.ok, str(outcome)
