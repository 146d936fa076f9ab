"""Calls that are executed and whose answer never comes.

Here on the way from Redis; the answers of a plane are lost on their way over HTTP, in
tests/contract/plane/test_lost_replies.py.
"""

import os
from pathlib import Path

import pytest

from tests.chaos.scenario import lost_replies
from tests.chaos.stage import Setup
from tests.chaos.subject import ON_REDIS, VERBS

EACH = 30 if os.environ.get("TENURE_CHAOS") == "all" else 15


@pytest.mark.parametrize("contract", ON_REDIS)
async def test_lost_answers_of_every_verb_lose_no_job_and_double_none(
    tmp_path: Path, contract: str
) -> None:
    setup = Setup(folder=tmp_path, contract=contract, seed=3, jobs=100, lease_ms=3_000)
    report = await lost_replies(setup, each=EACH)
    assert report.ok, str(report)
    for verb in VERBS:
        assert report.faults[f"lost reply: {verb}"] >= EACH
