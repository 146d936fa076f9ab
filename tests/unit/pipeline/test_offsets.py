"""What is missing of a journal, told from what the store counts."""

from __future__ import annotations

import pytest

from tenure.pipeline.session import plain
from tenure.pipeline.source.offsets import Mark, began_anew, journal_name
from tenure.pipeline.source.ranges import Head, Loss, gone_by_count, lost_by_count


def head(first: str, last: str, added: int, length: int) -> Head:
    return Head(first=first, last=last, added=added, length=length)


@pytest.mark.parametrize(
    ("mark", "now", "lost"),
    [
        pytest.param(
            Mark(upto="5-0", added=5), head("1-0", "9-0", 9, 9), 0, id="nothing was trimmed"
        ),
        pytest.param(
            Mark(upto="5-0", added=5), head("5-0", "9-0", 9, 5), 0, id="only what was read"
        ),
        pytest.param(
            Mark(upto="5-0", added=5), head("6-0", "9-0", 9, 4), 0, id="all that was read"
        ),
        pytest.param(Mark(upto="5-0", added=5), head("8-0", "9-0", 9, 2), 2, id="two unread"),
        pytest.param(Mark(upto="5-0", added=5), head("", "9-0", 9, 0), 4, id="everything"),
        pytest.param(
            Mark(upto="9-0", added=7), head("9-0", "9-0", 9, 1), 2, id="while it was read"
        ),
        pytest.param(Mark(upto="5-0", added=5), head("8-0", "9-0", 9, 2), 2, id="by the mark"),
        pytest.param(Mark(added=3), head("5-0", "9-0", 8, 4), 1, id="after the first look"),
        pytest.param(Mark(upto="5-0"), Head(first="8-0", last="9-0"), -1, id="no counter"),
    ],
)
def test_what_was_trimmed_unread_is_counted(mark: Mark, now: Head, lost: int) -> None:
    assert not began_anew(mark, now)
    assert lost_by_count(mark.upto, mark.added, now) == Loss(units=lost)


@pytest.mark.parametrize(
    ("mark", "now"),
    [
        pytest.param(
            Mark(upto="5-0", added=5), head("1-0", "4-0", 4, 4), id="it ends before the mark"
        ),
        pytest.param(Mark(upto="5-0", added=5), head("", "", 0, 0), id="it is gone"),
        pytest.param(
            Mark(upto="5-0", added=5), head("6-0", "9-0", 3, 3), id="fewer than were read"
        ),
        pytest.param(
            Mark(upto="5-0", added=5), head("6-0", "99-0", 50, 50), id="long, but all new"
        ),
    ],
)
def test_a_journal_that_began_anew_is_recognised(mark: Mark, now: Head) -> None:
    assert began_anew(mark, now)


def test_what_was_gone_at_the_first_look_is_not_a_loss() -> None:
    now = head("5-0", "9-0", 9, 5)
    assert lost_by_count("", gone_by_count(now), now) == Loss()


def test_the_name_of_a_journal_knows_no_password_and_no_tuning() -> None:
    plain_url = journal_name("streams+redis://host:6379/0")
    assert journal_name("streams+redis://me:secret@host:6379/0?lease_ms=99") == plain_url
    assert journal_name("streams+redis://host:6379/0?replicas=1") == plain_url
    assert journal_name("streams+redis://host:6379/1") != plain_url
    assert journal_name("streams+redis://host:6379/0?namespace=a:") != plain_url
    assert "secret" not in journal_name("bullmq+redis://me:secret@host:6379/0?queue=q")


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
