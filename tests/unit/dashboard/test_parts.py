"""Small parts: words for errors, durations, the bookkeeping of an observer."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from starlette.responses import HTMLResponse

from tenure.core.job import NewJob
from tenure.core.journal import JournalEvent
from tenure.core.registry import open_journal, open_ledger, open_queue
from tenure.core.seam import Counts
from tenure.dashboard.api import SearchLimit
from tenure.dashboard.app import _HeldResponse, local_path
from tenure.dashboard.display import (
    ErrorInfo,
    decode_json,
    error_info,
    moment,
    pretty,
    trace_link,
)
from tenure.dashboard.queues import OpenQueue
from tenure.dashboard.views import backlog
from tenure.dashboard.watch import ChangeListener, Observer, quantiles, summarize


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", ErrorInfo()),
        (b'{"code":"E","message":"m","stack":"s"}', ErrorInfo("E", "m", "s")),
        (b'{"message":"Timeout: slow"}', ErrorInfo("Timeout", "Timeout: slow")),
        (b'"KeyError: a"', ErrorInfo("KeyError", "KeyError: a")),
        (b"plain words", ErrorInfo("plain words", "plain words")),
        (b'{"stacktrace":["a","b"],"failedReason":"no"}', ErrorInfo("no", "no", "a\nb")),
    ],
)
def test_an_error_of_any_shape_is_taken_apart(raw: bytes, fault: ErrorInfo) -> None:
    assert error_info(raw) == fault


def test_bytes_that_are_no_json_are_shown_as_text() -> None:
    assert decode_json(b"\xff{") == "�{"


def test_quantiles_are_right_within_their_bucket() -> None:
    from tenure.dashboard.watch import bucket_of

    counts = Counter(bucket_of(ms) for ms in range(1, 1_001))
    for share, found in zip((0.5, 0.95, 0.99), quantiles([counts], (0.5, 0.95, 0.99)), strict=True):
        assert found == pytest.approx(share * 1_000, rel=0.16)
    assert quantiles([], (0.5,)) == [None]


def event(kind: str, ts_ms: int, **fields: Any) -> JournalEvent:
    given = {"seq": "1", "contract": "x", "queue": "q", "job_id": "1", **fields}
    return JournalEvent(type=kind, ts_ms=ts_ms, **given)


class NoQueue:
    name = "q"


def test_an_observer_tells_waiting_from_running() -> None:
    moved: list[str] = []
    observer = Observer(NoQueue(), lambda queue, job_id: moved.append(job_id))  # type: ignore[arg-type]
    for each in (
        event("submit", 10_000),
        event("claim", 10_500, worker_id="w"),
        event("retry", 10_700, worker_id="w", due_ms=12_000, error_code="E"),
        event("claim", 12_100, worker_id="w"),
        event("bury", 12_400, worker_id="w", error_code="E"),
    ):
        observer._note(each)
    total = summarize(observer.seconds.values(), 300)
    assert (total.submitted, total.started, total.retried, total.failed) == (1, 2, 1, 1)
    assert total.failed_share == 1.0
    assert total.wait_ms[0] == pytest.approx(100, rel=0.16)
    assert total.wait_ms[2] == pytest.approx(500, rel=0.16)
    assert total.run_ms[2] == pytest.approx(300, rel=0.16)
    assert observer.errors == {"E": 1}
    assert observer.workers["w"].started == 2
    assert moved == ["1"] * 5


async def test_an_observer_follows_a_queue_in_memory() -> None:
    url = "memory://observed"
    opened = OpenQueue("q", "memory", open_queue(url), open_ledger(url), open_journal(url))
    changes: asyncio.Queue[str] = asyncio.Queue()
    observer = Observer(opened, lambda queue, job_id: changes.put_nowait(job_id))
    try:
        for job_id in ("before the page was opened", "afterwards"):
            await opened.queue.submit([NewJob(job_id=job_id, task="t", payload=b"1")])
            observer.start()
            assert await asyncio.wait_for(changes.get(), 5) == job_id
    finally:
        await observer.stop()
    assert summarize(observer.window(), 300).submitted == 2


def test_a_listener_is_bounded_and_keeps_counting() -> None:
    from tenure.dashboard.watch import MOVED_MAX

    async def listen() -> tuple[int, int, int]:
        listener = ChangeListener()
        for number in range(2 * MOVED_MAX):
            listener.add("q", str(number))
        count, moved = listener.take()
        return count, len(moved), listener.take()[0]

    import asyncio

    assert asyncio.run(listen()) == (2 * MOVED_MAX, MOVED_MAX, 0)


def test_a_paused_queue_wants_no_workers_and_a_full_one_wants_enough() -> None:
    counts = Counts({"waiting": 41, "active": 4, "completed": 99})
    assert backlog("q", "bullmq", counts, per_worker=10).desired == 5
    assert backlog("q", "bullmq", counts, per_worker=10).backlog == 41
    paused = Counts({"waiting": 41}, paused=True)
    assert backlog("q", "bullmq", paused, per_worker=10).desired == 0


@pytest.mark.parametrize("text", ["//evil.example", "https://evil.example", "/\\evil", "", "x"])
def test_a_form_leads_back_to_our_own_pages_only(text: str) -> None:
    assert local_path(text, "/jobs") == "/jobs"


def test_steps_that_the_journal_left_out_are_counted_and_numbers_that_begin_anew_are_not() -> None:
    import time

    now_ms = time.time_ns() // 1_000_000
    observer = Observer(NoQueue(), lambda queue, job_id: None)  # type: ignore[arg-type]
    for each in (
        event("claim", now_ms, job_id="met late", ver=7),
        event("submit", now_ms, job_id="whole", ver=1),
        event("claim", now_ms, job_id="whole", ver=2),
        event("reject", now_ms, job_id="whole", ver=0),
        event("complete", now_ms, job_id="whole", ver=3),
        event("submit", now_ms, job_id="whole", ver=1),  # removed, and submitted again
    ):
        observer._note(each)
    assert observer.missing == 0
    observer._note(event("complete", now_ms, job_id="met late", ver=10))
    assert observer.missing == 2


def test_what_is_no_trace_id_does_not_reach_the_link_to_a_trace() -> None:
    url, trace_id = "https://traces.example/t/{trace_id}", "0af7651916cd43dd8448eb211c80319c"
    assert trace_link(url, f"00-{trace_id}-b7ad6b7169203331-01")[1].endswith(f"/t/{trace_id}")
    for other in ("../../admin?x=", "%2e%2e", "", trace_id + "/..", trace_id.upper()):
        assert trace_link(url, f"00-{other}-b7ad6b7169203331-01") == ("", "")


def test_deep_json_whose_spaces_would_be_many_is_shown_without_them_and_cut_off() -> None:
    deep: object = list(range(30_000))
    for _ in range(60):
        deep = [deep]
    assert pretty(deep) == msgspec.json.encode(deep).decode()
    assert len(pretty(["x" * 3_000_000])) <= (1 << 20) + 1
    assert (
        pretty({"a": ["[", '\\"{,', 1]}) == '{\n  "a": [\n    "[",\n    "\\\\\\"{,",\n    1\n  ]\n}'
    )
    flat = {str(number): [number] for number in range(10_000)}
    assert pretty(flat).count("\n") == 30_001


async def test_a_page_keeps_its_place_until_it_was_taken_over() -> None:
    searches, go, sent = SearchLimit(), asyncio.Event(), list[int]()

    async def send(message: Any) -> None:
        sent.append(len(message.get("body", b"")))
        if len(sent) == 3:
            await go.wait()

    place = ExitStack()
    place.enter_context(searches.slot("key"))
    page = _HeldResponse(HTMLResponse("x" * 200_000), place)
    serving = asyncio.create_task(page({}, None, send))
    while len(sent) < 3:
        await asyncio.sleep(0)
    assert searches.running["key"] == 1
    go.set()
    await serving
    assert sum(sent) == 200_000
    assert not searches.running


def test_the_error_codes_that_an_observer_counts_are_bounded() -> None:
    observer = Observer(NoQueue(), lambda queue, job_id: None)  # type: ignore[arg-type]
    for number in range(3_000):
        observer._note(
            JournalEvent(
                seq=str(number),
                contract="memory",
                queue="q",
                job_id=f"j{number}",
                type="bury",
                ts_ms=number,
                error_code=f"E{number}",
            )
        )
    assert (len(observer.errors), observer.errors["other"]) == (1_001, 2_000)


@pytest.mark.parametrize("ts_ms", [2**63, 10**15, 253_402_300_800_000, -1, -(10**15)])
def test_a_time_that_no_date_can_show_ends_no_page(ts_ms: int) -> None:
    """Another program may have stored any time, of a job or of a schedule."""
    wanted = "9999-12-31 23:59:59.999Z" if ts_ms > 0 else "1970-01-01 00:00:00.000Z"
    assert moment(ts_ms) == wanted
