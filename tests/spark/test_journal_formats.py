"""What a contract declares of its journal is true: in bulk it reads as through the seam."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tenure.core.registry import journal_format
from tenure.pipeline.source.journal import read_range
from tenure.pipeline.source.offsets import JournalRange, journal_name, open_reader
from tenure.store.embedded import EmbeddedRedis
from tests.spark.working import as_rows, journal_of, without_place, work


@pytest.fixture(params=["streams", "bullmq", "omniq", "inbox", "plane"])
def url(request: pytest.FixtureRequest, redis: EmbeddedRedis, tmp_path: Path) -> str:
    match request.param:
        case "omniq":
            return f"omniq+{redis.url}?queue=format-{tmp_path.name}"
        case "inbox" | "plane" as contract:
            return f"{contract}+sqlite:///{tmp_path}/jobs.db"
        case contract:
            return str(request.getfixturevalue(f"{contract}_url"))


def in_bulk(url: str) -> list[dict[str, Any]]:
    """As tasks read it: in ranges, each opened anew."""
    reader = open_reader(url)
    ranges = reader.split("", reader.head().last, 3)
    reader.close()
    return [
        row
        for after, upto in ranges
        for batch in read_range(
            JournalRange(journal=journal_name(url), url=url, after=after, upto=upto)
        )
        for row in batch.to_pylist()
    ]


async def test_a_journal_in_bulk_is_the_journal_of_the_seam(url: str) -> None:
    await work(url, 30, fail_every=7)
    expected = as_rows(await journal_of(url))
    assert len(expected) >= 90
    found = await asyncio.to_thread(in_bulk, url)
    assert without_place(found) == expected
    assert [row["pos"] for row in found] == sorted({row["pos"] for row in found})
    assert journal_format(url) is not None, "it was read through the seam"
