"""What a handler sees, and how handlers are declared."""

import pytest

from tenure.core.errors import UsageError
from tenure.core.lease import Lease, Report
from tenure.core.retry import exponential
from tenure.worker import Job, Settings, Worker, identity, task
from tenure.worker.config import capacity
from tenure.worker.job import TERMINAL_TYPES, WRITTEN, Attempt, Written, read_payload
from tenure.worker.task import Tasks


def made(payload: bytes = b"{}") -> tuple[Job, list[Report]]:
    reports: list[Report] = []

    def keep(_attempt: Attempt, report: Report) -> Written:
        reports.append(report)
        return WRITTEN

    lease = Lease(
        job_id="j1",
        queue="q",
        task="t",
        payload=payload,
        attempt=2,
        max_attempts=5,
        fence=2,
        token="x",
        lease_until_ms=0,
        lease_ms=1000,
    )
    return Job(Attempt(lease, 10.0, 3.0), keep, "w1", 7.0), reports


def test_a_job_shows_its_lease_in_plain_words() -> None:
    job, _ = made(b'{"a": [1]}')
    assert (job.id, job.task, job.queue, job.attempt, job.max_attempts) == ("j1", "t", "q", 2, 5)
    assert job.payload == {"a": [1]}
    assert job.payload is job.payload
    assert job.deadline == 10.0
    assert not job.cancelled


@pytest.mark.parametrize("raw", [b"not json", b'{"a":', b""])
def test_a_payload_that_is_not_json_comes_as_raw_text(raw: bytes) -> None:
    assert read_payload(raw) == {"_raw": raw.decode()}


def test_bytes_that_are_not_even_text_come_as_raw_too() -> None:
    assert read_payload(b"\xff\xfe") == {"_raw": "\ufffd\ufffd"}


@pytest.mark.parametrize("type_", sorted(TERMINAL_TYPES))
def test_a_handler_cannot_report_the_end_of_its_job(type_: str) -> None:
    job, reports = made()
    with pytest.raises(UsageError, match=f"cannot report '{type_}'"):
        job.report(100, type=type_)
    assert reports == []


async def test_a_report_carries_json() -> None:
    job, reports = made()
    await job.report({"pct": 3}, "scene", type="token", data=["x"])
    await job.report(type="tick")
    assert (reports[0].progress, reports[0].data) == (b'{"pct":3}', b'["x"]')
    assert (reports[0].type, reports[0].step) == ("token", "scene")
    assert (reports[1].progress, reports[1].data) == (b"", b"{}")


def test_a_task_knows_its_kind_and_can_be_called_like_its_function() -> None:
    @task("a", timeout_s=3, retry=exponential())
    async def a(job: Job) -> int:
        return 1

    @task("b")
    def b(job: Job) -> int:
        return 2

    assert (a.kind, b.kind, a.timeout_s) == ("async", "thread", 3)
    assert b("anything") == 2


def test_two_handlers_of_one_name_are_refused() -> None:
    @task("a")
    async def first(job: Job) -> None: ...

    @task("a")
    async def second(job: Job) -> None: ...

    with pytest.raises(UsageError, match="two handlers"):
        Tasks([first, second])


def test_a_plain_function_is_not_a_task() -> None:
    def plain(job: Job) -> None: ...

    with pytest.raises(UsageError, match="decorate it"):
        Worker([plain], queues=["memory://x"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "words"), [({"name": ""}, "needs a name"), ({"name": "x", "timeout_s": 0}, "0")]
)
def test_a_task_is_checked_when_it_is_declared(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        task(**arguments)  # type: ignore[arg-type]


def test_queues_given_as_one_string_are_refused_with_an_example() -> None:
    @task("a")
    async def a(job: Job) -> None: ...

    with pytest.raises(UsageError, match="list of queue URLs"):
        Worker([a], queues="memory://x")


@pytest.mark.parametrize(
    ("settings", "kinds", "slots"),
    [
        (Settings(), {"async"}, 100),
        (Settings(), {"thread"}, 16),
        (Settings(threads=4), {"thread"}, 4),
        (Settings(processes=3), {"process"}, 3),
        (Settings(threads=4, processes=3), {"process", "thread"}, 7),
        (Settings(concurrency=7), {"async", "thread"}, 7),
        (Settings(), {"async", "process"}, 100),
    ],
)
def test_slots_follow_the_kinds_of_handlers(
    settings: Settings, kinds: set[str], slots: int
) -> None:
    assert capacity(settings, kinds).slots == slots


@pytest.mark.parametrize("name", ["concurrency", "threads", "processes", "settle_batch_max"])
def test_settings_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is at least 1"):
        Settings(**{name: 0})


def test_identity_prefers_the_pod_and_is_new_at_every_boot() -> None:
    environ = {"POD_NAME": "render-0", "HOSTNAME": "node7"}
    assert identity(environ, boot="b") == "render-0-b"
    assert identity({"HOSTNAME": "node7"}, boot="b") == "node7-b"
    first, second = identity(environ), identity(environ)
    assert first != second
    assert first.startswith("render-0-")
    assert len(identity().rpartition("-")[2]) == 12
