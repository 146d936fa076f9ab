"""Report and events: what followers of a job see."""

import pytest

from tenure.core.job import JobEvent
from tenure.core.lease import Report
from tenure.core.seam import PAGE_BYTES, is_full
from tests.contract.adapters import Stage
from tests.contract.suite.acting import claim_one, job, record, settle, submit


@pytest.mark.clause("M-14")
async def test_a_report_reaches_the_events_and_the_progress_of_the_job(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    news = [
        Report(lease=lease, type="progress", step="scene 1", data=b'{"a":1}', progress=b"25"),
        Report(lease=lease, type="token", data=b'{"text":"hello"}'),
    ]
    assert await queue.report(news) == [None, None]
    stored = await record(stage, job_id)
    assert stored.progress == b"25"
    told = [
        event for event in await stage.ledger.events(job_id) if event.type in ("progress", "token")
    ]
    assert [(event.type, event.step, event.data) for event in told] == [
        ("progress", "scene 1", b'{"a":1}'),
        ("token", "", b'{"text":"hello"}'),
    ]


@pytest.mark.clause("M-21")
async def test_events_are_read_after_a_cursor_without_gap_or_repeat(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    await queue.report([Report(lease=lease, type="token", data=b'{"n":%d}' % n) for n in range(5)])
    await settle(queue, lease, "complete")
    whole = await stage.ledger.events(job_id)
    for at, event in enumerate(whole):
        assert await stage.ledger.events(job_id, after=event.event_id) == whole[at + 1 :]
    assert await stage.ledger.events(job_id, limit=2) == whole[:2]


@pytest.mark.clause("M-21")
async def test_a_page_of_events_ends_at_a_number_of_bytes_and_the_next_goes_on(
    stage: Stage,
) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    text = b"x" * (PAGE_BYTES // 40)
    news = [
        Report(lease=lease, type="token", data=b'{"n":%d,"t":"%b"}' % (n, text)) for n in range(90)
    ]
    for start in range(0, len(news), 10):
        assert await queue.report(news[start : start + 10]) == [None] * 10
    await settle(queue, lease, "complete")
    pages: list[list[JobEvent]] = []
    while events := await stage.ledger.events(
        job_id, after=pages[-1][-1].event_id if pages else ""
    ):
        assert sum(len(event.data) for event in events[:-1]) < PAGE_BYTES
        pages.append(events)
    assert len(pages) == 3
    assert [is_full(page, 1000) for page in pages] == [True, True, False]
    told = [event.data for page in pages for event in page if event.type == "token"]
    assert told == [each.data for each in news]


@pytest.mark.clause("M-21")
@pytest.mark.parametrize(
    ("kind", "word"), [("complete", "done"), ("bury", "failed"), ("cancel", "cancelled")]
)
async def test_the_last_event_of_a_finished_job_says_its_end(
    stage: Stage, kind: str, word: str
) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    await settle(queue, await claim_one(queue), kind)  # type: ignore[arg-type]
    events = await stage.ledger.events(job_id)
    (final,) = stage.words.of(word)
    assert events[-1].type == final
    assert [event.type for event in events].count(final) == 1


@pytest.mark.clause("M-21")
async def test_an_unknown_job_has_no_events(stage: Stage) -> None:
    assert await stage.ledger.events("no-such-job") == []
