"""Retry: the class of a failure decides whether and when; three counters that never mix."""

import pytest

from tenure.contracts.inbox.queue import THROTTLED_FACTOR, backoff, retry_class
from tenure.core.outcome import BURIED, Failure, Retried
from tests.contract.inbox_stage import InboxStage
from tests.contract.suite.acting import claim_one, job, record, settle, submit


def failure(code: object, *, retryable: bool = True) -> Failure:
    return Failure(code=str(code), message="it failed", retryable=retryable)


@pytest.mark.clause("I-18")
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *((code, "busy") for code in (423, 500, 502, 503, 504)),
        *(("http_503", "busy"), (429, "throttled"), ("s3_429", "throttled")),
        *((401, "refused"), (403, "refused"), (400, "hopeless"), (404, "hopeless")),
        *((410, "hopeless"), ("TimeoutError", "plain"), ("E12503", "plain"), (501, "plain")),
    ],
)
def test_a_failure_has_the_class_of_its_status(code: object, kind: str) -> None:
    assert retry_class(failure(code)) == kind


@pytest.mark.clause("I-18", "I-19")
def test_delays_grow_and_spread_and_a_throttled_one_begins_larger() -> None:
    first = [backoff(failure(503), n, 1_000, 1.0)[0] for n in (1, 2, 3, 4)]
    assert first == [1_000, 2_000, 4_000, 8_000]
    assert backoff(failure(503), 3, 1_000, 0.0)[0] == 2_000  # half of it is chance
    throttled = backoff(failure(429), 1, 1_000, 1.0)[0]
    assert throttled == THROTTLED_FACTOR * 1_000
    assert backoff(failure(429), 1, 1_000, 0.0)[0] > backoff(failure(503), 1, 1_000, 1.0)[0]
    assert backoff(failure(404), 1, 1_000, 0.5) == (0, False)
    assert backoff(failure("Odd", retryable=False), 1, 1_000, 0.5) == (0, False)


@pytest.mark.clause("I-18", "I-20")
async def test_the_store_retries_what_may_pass_and_gives_up_what_cannot(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    busy, throttled, hopeless = await submit(queue, *[job(max_attempts=3) for _ in range(3)])
    due = {}
    for code in (503, 429):
        verdict = await settle(queue, await claim_one(queue), "fail", failure=failure(code))
        assert isinstance(verdict, Retried)
        due[code] = verdict.due_ms
    assert due[429] - due[503] > 2_000
    assert await settle(queue, await claim_one(queue), "fail", failure=failure(404)) == BURIED
    assert (await record(inbox, hopeless)).state == "dead_letter"
    assert {(await record(inbox, each)).state for each in (busy, throttled)} == {"queued"}


@pytest.mark.clause("I-18")
async def test_a_tasks_own_policy_does_not_bypass_the_larger_bucket(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    await submit(queue, *[job(max_attempts=3) for _ in range(3)])
    waits = []
    for code, delay_ms in ((503, 10), (429, 10), (429, 60_000)):
        lease = await claim_one(queue)
        verdict = await settle(queue, lease, "retry", failure=failure(code), delay_ms=delay_ms)
        assert isinstance(verdict, Retried)
        ended_ms = (await record(inbox, lease.job_id)).updated_ms
        waits.append(verdict.due_ms - ended_ms)
    assert waits[0] <= 10
    assert waits[1] > THROTTLED_FACTOR * 1_000 / 2 - 1_000
    assert 59_000 < waits[2] <= 60_000


@pytest.mark.clause("I-20")
@pytest.mark.options(retry_delay_ms=0)
async def test_at_the_limit_of_its_attempts_a_job_is_a_dead_letter(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=3))
    for _ in range(2):
        assert isinstance(
            await settle(queue, await claim_one(queue), "fail", failure=failure(500)), Retried
        )
    assert await settle(queue, await claim_one(queue), "fail", failure=failure(500)) == BURIED
    stored = await record(inbox, job_id)
    assert (stored.state, stored.attempt) == ("dead_letter", 3)
    attempts = await inbox.ledger.attempts(job_id)  # type: ignore[attr-defined]
    assert [each["verdict"] for each in attempts] == ["retry", "retry", "bury"]
    assert [each["error_code"] for each in attempts] == ["500"] * 3
