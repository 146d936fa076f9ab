"""Calls that are executed and whose answer never comes."""

from pathlib import Path

from tests.chaos.scenario import lost_replies
from tests.chaos.stage import Setup
from tests.chaos.subject import VERBS

EACH = 30


async def test_lost_answers_of_every_verb_lose_no_job_and_double_none(tmp_path: Path) -> None:
    report = await lost_replies(Setup(folder=tmp_path, seed=3, jobs=100), each=EACH)
    assert report.ok, str(report)
    for verb in VERBS:
        assert report.faults[f"lost reply: {verb}"] >= EACH
