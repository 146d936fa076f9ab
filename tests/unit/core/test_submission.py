"""What every contract asks of a new job, and what callers over HTTP hear of a refused one."""

import pytest

from tenure.core.endpoint import check_stored
from tenure.core.errors import Conflict, InvalidJob, QueueFull, TenureError
from tenure.core.job import NewJob, Submitted, check_job, submitted


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"task": ""}, "1 to 200 printable"),
        ({"task": "a\nb"}, "1 to 200 printable"),
        ({"task": "x" * 201}, "1 to 200 printable"),
        ({"max_attempts": 0}, "at least 1, not 0"),
        ({"delay_ms": -1}, "cannot be negative"),
        ({"payload": b"{"}, "not JSON"),
    ],
)
def test_what_no_contract_could_keep_is_refused(wrong: dict[str, object], says: str) -> None:
    fields = {"task": "work", "payload": b"{}"} | wrong
    with pytest.raises(InvalidJob, match=says):
        check_job(NewJob(**fields))


def test_a_job_at_the_limits_is_taken() -> None:
    check_job(NewJob(task="x" * 200, payload=b"null", max_attempts=1))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (submitted("conflict", "j1", depth_max=7), Conflict),
        (submitted("full", "j1", depth_max=7), QueueFull),
        (Submitted("j1", "invalid", "no such option"), InvalidJob),
    ],
)
def test_a_job_that_was_not_stored_is_told_with_its_reason(
    answer: Submitted, error: type[TenureError]
) -> None:
    with pytest.raises(error) as told:
        check_stored(answer)
    assert str(told.value) == answer.reason != ""


def test_a_stored_job_passes_whether_it_is_new_or_not() -> None:
    for status in ("created", "replayed"):
        answer = submitted(status, "j1", 5, depth_max=7)
        check_stored(answer)
        assert answer.accepted
