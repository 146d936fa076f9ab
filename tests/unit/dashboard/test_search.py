"""The language of the search box."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.core.job import JobRecord
from tenure.dashboard import search
from tenure.dashboard.display import decode_json
from tenure.dashboard.search import HELP, SearchError, parse

NOW_MS = 1_800_000_000_000


def job(**fields: object) -> JobRecord:
    given: dict[str, object] = {
        "job_id": "job-1",
        "contract": "streams",
        "queue": "q",
        "task": "send",
        "state": "error",
        "payload": b'{"user":{"id":7,"plan":"free"},"tags":["a","b"],"note":"Big Sale"}',
        "result": b'{"size":12.5}',
        "error": b'{"code":"ConnectionError","message":"timed out"}',
        "attempt": 3,
        "created_ms": NOW_MS - 3_600_000,
        "worker_id": "host-1",
    }
    return JobRecord(**{**given, **fields})  # type: ignore[arg-type]


def finds(text: str, record: JobRecord | None = None, queue: str = "mail") -> bool:
    return parse(text, now_ms=NOW_MS).matches(record or job(), queue)


def test_a_job_is_taken_apart_once_however_many_terms_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[bytes] = []

    def reading(raw: bytes) -> object:
        read.append(raw)
        return decode_json(raw)

    monkeypatch.setattr(search, "decode_json", reading)
    record = job(payload=b'{"a":1,"b":2,"c":3}')
    assert finds("payload.a=1 payload.b=2 payload.c=3 result.size=12.5 result.size>1", record)
    assert read == [record.payload, record.result]


def test_a_term_that_is_repeated_counts_once_and_their_number_is_bounded() -> None:
    assert len(parse("timed " * 100, now_ms=NOW_MS).terms) == 1
    assert len(parse(" ".join(f"w{n}" for n in range(20)), now_ms=NOW_MS).terms) == 20
    for text in (" ".join(f"w{n}" for n in range(21)), "payload=" + "*a,*b," * 10):
        with pytest.raises(SearchError, match="at most 20 terms"):
            parse(text, now_ms=NOW_MS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "queue:mail",
        "queue:ma*",
        "is:failed",
        "is:failed,done",
        "state:error",
        "task:send",
        "task:se*",
        "error:ConnectionError",
        "error:Conn*",
        "id:job-1",
        "worker:host-1",
        "payload.user.id=7",
        "payload.user.plan:free",
        "payload.tags.1=b",
        'payload.note="Big Sale"',
        "payload.user.id>6",
        "result.size<13",
        "attempt>2",
        "attempt=3",
        "since:2h",
        "before:30m",
        '"timed out"',
        "SALE",
        "-task:other",
        "-is:done",
        'is:failed error:Connection* since:2h -payload.user.plan=paid "timed out"',
    ],
)
def test_a_term_finds_the_job_that_fulfils_it(text: str) -> None:
    assert finds(text)


@pytest.mark.parametrize(
    "text",
    [
        "queue:other",
        "is:done",
        "state:done",
        "task:sen",
        "error:Connection",
        "id:job",
        "payload.user.id=8",
        "payload.missing=1",
        "payload.user.plan>1",
        "attempt<3",
        "since:30m",
        "before:2h",
        "nowhere",
        "-task:send",
        "-sale",
        "is:failed task:other",
    ],
)
def test_a_term_leaves_out_the_job_that_does_not(text: str) -> None:
    assert not finds(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stat:done", "did you mean 'state'"),
        ("is:nothing", "the states are waiting, scheduled, running, done, failed, cancelled"),
        ("attempt>many", "compared with a number"),
        ("since:tomorrow", "write 30s, 15m, 2h, 7d"),
        ("task:", "needs a value"),
        ("x" * 1001, "at most 1000"),
    ],
)
def test_what_cannot_be_read_is_explained(text: str, said: str) -> None:
    with pytest.raises(SearchError, match=said):
        parse(text, now_ms=NOW_MS)


def test_a_link_is_text_and_not_a_field() -> None:
    record = job(payload=b'{"url":"https://example.org/a"}')
    assert finds("https://example.org/a", record)


def test_a_date_is_read_in_utc() -> None:
    record = job(created_ms=1_767_225_600_000)
    assert finds("since:2026-01-01", record)
    assert not finds("before:2026-01-01", record)
    assert finds("before:2026-01-01T00:00:01", record)


def test_states_are_asked_of_the_ledger_in_its_own_words() -> None:
    known = ("queued", "running", "done", "error")

    def words(text: str) -> tuple[str, ...] | None:
        return parse(text, now_ms=0).states("streams", known)

    assert words("is:failed") == ("error",)
    assert words("is:scheduled") == words("is:waiting") == ("queued",)  # it has one word for both
    assert words("-is:failed,cancelled") == ("queued", "running", "done")
    assert words("-is:failed") == known  # a job under `error` may have been cancelled
    assert words("state:completed") is None
    assert words("") == ()


def test_a_word_of_several_meanings_is_told_apart_job_by_job() -> None:
    cancelled = job(error=b'{"code":"cancelled","message":"on request"}')
    assert finds("is:cancelled", cancelled)
    assert not finds("is:failed", cancelled)
    assert finds("is:failed")
    assert finds("is:scheduled", job(state="queued", due_ms=5))
    assert finds("is:waiting", job(contract="inbox", state="failed"))  # it rests there


def test_a_full_task_or_id_is_handed_down_and_a_pattern_is_not() -> None:
    assert parse("task:send", now_ms=0).task == "send"
    assert parse("task:se*", now_ms=0).task == ""
    assert parse("-task:send", now_ms=0).task == ""
    assert parse("id:a", now_ms=0).job_id == "a"
    assert parse("id:a,b", now_ms=0).job_id == ""


def test_every_line_of_the_help_can_be_searched_for() -> None:
    for line, _ in HELP:
        for text in line.replace("WORD", "done").replace("NAME", "x").split("  "):
            parse(text, now_ms=NOW_MS)


@given(st.text(max_size=200))
def test_any_text_is_a_search_or_explained(text: str) -> None:
    with suppress(SearchError):
        assert finds(text) in (True, False)
