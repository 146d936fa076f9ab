"""What is missing of a journal, told from what the store counts."""

from __future__ import annotations

import pytest

from tenure.pipeline.lake.layout import EventFile, _counting
from tenure.pipeline.source.offsets import Mark, began_anew
from tenure.pipeline.source.opening import journal_name
from tenure.pipeline.source.range_reader import Head, Loss, gone_by_count, lost_by_count
from tenure.pipeline.spark_errors import plain


def head(first: str, last: str, added: int, length: int) -> Head:
    return Head(first=first, last=last, added=added, length=length)


@pytest.mark.parametrize(
    ("mark", "now", "so_far", "lost"),
    [
        pytest.param(Mark(upto="5-0"), head("1-0", "9-0", 9, 9), 5, 0, id="nothing was trimmed"),
        pytest.param(Mark(upto="5-0"), head("5-0", "9-0", 9, 5), 5, 0, id="only what was read"),
        pytest.param(Mark(upto="5-0"), head("6-0", "9-0", 9, 4), 5, 0, id="all that was read"),
        pytest.param(Mark(upto="5-0"), head("8-0", "9-0", 9, 2), 5, 2, id="two unread"),
        pytest.param(Mark(upto="5-0"), head("", "9-0", 9, 0), 5, 4, id="everything"),
        pytest.param(Mark(upto="9-0"), head("9-0", "9-0", 9, 1), 7, 2, id="while it was read"),
        pytest.param(Mark(upto="5-0", added=5), head("8-0", "9-0", 9, 2), -1, 2, id="by the mark"),
        pytest.param(Mark(added=3), head("5-0", "9-0", 8, 4), -1, 1, id="after the first look"),
        pytest.param(Mark(upto="5-0"), Head(first="8-0", last="9-0"), -1, -1, id="no counter"),
    ],
)
def test_what_was_trimmed_unread_is_counted(mark: Mark, now: Head, so_far: int, lost: int) -> None:
    assert not began_anew(mark, now, so_far)
    read = so_far if so_far >= 0 else mark.added
    assert lost_by_count(mark.upto, read, now) == Loss(units=lost)


@pytest.mark.parametrize(
    ("mark", "now", "so_far"),
    [
        pytest.param(Mark(upto="5-0"), head("1-0", "4-0", 4, 4), 5, id="it ends before the mark"),
        pytest.param(Mark(upto="5-0"), head("", "", 0, 0), 5, id="it is gone"),
        pytest.param(Mark(upto="5-0"), head("6-0", "9-0", 3, 3), 5, id="fewer than were read"),
        pytest.param(Mark(upto="5-0"), head("6-0", "99-0", 50, 50), 5, id="long, but all new"),
    ],
)
def test_a_journal_that_began_anew_is_recognised(mark: Mark, now: Head, so_far: int) -> None:
    assert began_anew(mark, now, so_far)


def test_what_was_gone_at_the_first_look_is_not_a_loss() -> None:
    now = head("5-0", "9-0", 9, 5)
    assert lost_by_count("", gone_by_count(now), now) == Loss()


def test_the_name_of_a_journal_knows_no_password_and_no_tuning() -> None:
    plain_url = journal_name("streams+redis://host:6379/0")
    assert journal_name("streams+redis://me:secret@host:6379/0?lease_ms=99") == plain_url
    assert journal_name("streams+redis://host:6379/1") != plain_url
    assert journal_name("streams+redis://host:6379/0?namespace=a:") != plain_url
    assert "secret" not in journal_name("bullmq+redis://me:secret@host:6379/0?queue=q")


def test_files_that_a_larger_one_covers_do_not_count() -> None:
    def file(after: int, upto: int, journal: str = "a") -> EventFile:
        return EventFile("2026-11-16", journal, after, upto)

    large, left, right, other = file(0, 9), file(0, 4), file(4, 9), file(2, 3, "b")
    assert _counting([left, right, other, large]) == [large, other]
    assert _counting([left, right]) == [left, right]


def test_an_error_inside_spark_comes_back_as_what_it_was() -> None:
    from tenure.core.errors import StoreUnreachable

    text = (
        "[STREAM_FAILED] Query failed: Traceback (most recent call last):\n  File 'a', line 1\n"
        "OSError: refused\n\nThe above exception was the direct cause\n\n"
        "tenure.core.errors.StoreUnreachable: redis://x: cannot connect\n SQLSTATE: 38000\n"
        "=== Streaming Query ===\nIdentifier: x"
    )
    error = plain(text)
    assert isinstance(error, StoreUnreachable)
    assert str(error) == "redis://x: cannot connect"
