"""Group commit: batches form by themselves, and an outcome counts only when it was answered."""

import asyncio
from collections.abc import Sequence

from tenure.core.errors import ReplyLost, ServerError, StoreUnreachable, UsageError
from tenure.core.outcome import Outcome
from tenure.core.seam import QueueFeatures
from tenure.worker import Job, Settings, Worker, task
from tests.unit.worker.seam import Store, View, serving

QUICK = Settings(backoff_ms=1, backoff_ms_max=5, concurrency=100)


@task("noop")
async def noop(job: Job) -> None:
    return None


async def test_an_idle_flusher_settles_at_once() -> None:
    store = Store()
    store.add("noop")
    worker = Worker([noop], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("settled", timeout_s=1)
    assert ("settle", 1) in store.batches


async def test_what_finishes_while_a_settle_is_under_way_goes_together_in_the_next() -> None:
    store = Store()
    gate = store.gates["settle"] = asyncio.Event()
    store.add("noop")
    worker = Worker([noop], queues=[store.open], settings=QUICK)
    async with serving(worker):
        while store.calls["settle"] < 1:
            await asyncio.sleep(0)
        store.add("noop", 40)
        await worker.watch.until("started", 41)
        gate.set()
        await worker.watch.until("settled", 41)
    assert [size for name, size in store.batches if name == "settle"] == [1, 40]


class Wide(View):
    """A store that works on two settles side by side."""

    features = QueueFeatures(settles_at_once=2)


async def test_only_a_full_batch_goes_beside_another_where_the_store_takes_two() -> None:
    store = Store()
    gate = store.gates["settle"] = asyncio.Event()
    store.add("noop", 20)
    settings = Settings(settle_batch_max=8, concurrency=100)
    worker = Worker([noop], queues=[lambda: Wide(store)], settings=settings)
    async with serving(worker):
        await worker.watch.until("started", 20)
        while store.calls["settle"] < 2:
            await asyncio.sleep(0)
        store.add("noop", 3)
        await worker.watch.until("started", 23)
        await asyncio.sleep(0)
        assert store.calls["settle"] == 2
        assert worker.health().unsettled == 23
        gate.set()
        await worker.watch.until("settled", 23)
    sizes = [size for name, size in store.batches if name == "settle"]
    assert sizes == [8, 8, 7]


async def test_one_side_by_side_that_fails_does_not_keep_the_other_up() -> None:
    store = Store()
    store.add("noop", 16)
    lost = 3

    def strike(outcomes: Sequence[Outcome]) -> ReplyLost | None:
        nonlocal lost
        if outcomes[0].lease.job_id != "noop-1" or not lost:
            return None
        lost -= 1
        return ReplyLost("no answer")

    store.after["settle"] = strike
    settings = Settings(backoff_ms=1, backoff_ms_max=5, settle_batch_max=8, concurrency=100)
    worker = Worker([noop], queues=[lambda: Wide(store)], settings=settings, burst=True)
    assert await worker.serve() == 0
    assert worker.watch.counts["settle_failed"] == 3
    assert len(store.kinds()) == 16
    assert worker.health().unsettled == 0


async def test_a_batch_is_never_larger_than_its_limit() -> None:
    store = Store()
    store.add("noop", 100)
    settings = Settings(settle_batch_max=7, concurrency=100)
    assert await Worker([noop], queues=[store.open], settings=settings, burst=True).serve() == 0
    sizes = [size for name, size in store.batches if name == "settle"]
    assert max(sizes) == 7
    assert sum(sizes) == 100


async def test_an_outcome_whose_reply_was_lost_is_sent_again_and_counted_once() -> None:
    store = Store()
    lost = 3

    def strike(_: object) -> ReplyLost | None:
        nonlocal lost
        lost -= 1
        return ReplyLost("no answer") if lost >= 0 else None

    store.after["settle"] = strike
    store.add("noop", 5)
    worker = Worker([noop], queues=[store.open], settings=QUICK)
    async with serving(worker):
        await worker.watch.until("settled", 5)
    assert worker.watch.counts["settle_failed"] == 3
    assert worker.watch.counts["lost"] == 0
    assert store.kinds() == {f"noop-{n}": "complete" for n in range(1, 6)}


async def test_an_outcome_is_dropped_as_lost_once_its_local_deadline_has_passed() -> None:
    store = Store(lease_ms=150)
    store.before["settle"] = lambda _: StoreUnreachable("away")
    store.before["extend"] = lambda _: StoreUnreachable("away")
    store.add("noop", 2)
    worker = Worker([noop], queues=[store.open], settings=QUICK)
    async with serving(worker):
        await worker.watch.until("lost", 2)
        assert worker.health().unsettled == 0
    assert store.outcomes == {}
    labels = {"queue": "open", "task": "noop"}
    assert worker.registry.get_sample_value("tenure_lease_lost_total", labels) == 2


async def test_a_lease_is_kept_while_its_outcome_waits_for_the_store() -> None:
    """The keeper goes on extending, so a short outage of settle alone costs nothing."""
    store = Store(lease_ms=600)
    down = True
    store.before["settle"] = lambda _: StoreUnreachable("away") if down else None
    store.add("noop")
    worker = Worker([noop], queues=[store.open], settings=QUICK)
    async with serving(worker):
        await worker.watch.until("extended", 6)  # two lease lengths
        down = False
        await worker.watch.until("settled")
    assert store.kinds() == {"noop-1": "complete"}


async def test_one_poisonous_item_does_not_harm_its_neighbours() -> None:
    store = Store()

    def strike(outcomes: Sequence[Outcome]) -> ServerError | None:
        poisoned = any(outcome.lease.job_id == "noop-13" for outcome in outcomes)
        return ServerError("ERR too big") if poisoned else None

    store.before["settle"] = strike
    gate = store.gates["settle"] = asyncio.Event()
    store.add("noop", 50)
    worker = Worker([noop], queues=[store.open], settings=QUICK)
    async with serving(worker):
        await worker.watch.until("started", 50)
        gate.set()
        await worker.watch.until("settled", 49)
        await worker.watch.until("lost", 1)  # given up after a few tries, left to run out
    assert "noop-13" not in store.outcomes
    assert len(store.outcomes) == 49


async def test_a_server_error_that_passes_costs_no_outcome() -> None:
    store = Store()
    strikes = 4

    def strike(_: object) -> ServerError | None:
        nonlocal strikes
        strikes -= 1
        return ServerError("LOADING") if strikes >= 0 else None

    store.before["settle"] = strike
    store.add("noop", 3)
    worker = Worker([noop], queues=[store.open], settings=QUICK)
    async with serving(worker):
        await worker.watch.until("settled", 3)
    assert worker.watch.counts["lost"] == 0


async def test_a_report_is_written_before_the_outcome_of_its_attempt() -> None:
    """Even when the handler does not await it."""
    store = Store()
    gate = store.gates["report"] = asyncio.Event()

    @task("talk")
    async def talk(job: Job) -> None:
        job.report(50, "half")

    store.add("talk")
    worker = Worker([talk], queues=[store.open], settings=QUICK)
    async with serving(worker):
        while store.calls["report"] < 1:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert store.calls["settle"] == 0
        gate.set()
        await worker.watch.until("settled")
    assert [(report.step, report.progress) for report in store.reports] == [("half", b"50")]


async def test_a_report_the_store_refuses_is_the_handlers_error_and_not_a_lost_lease() -> None:
    store = Store()
    store.before["report"] = lambda _: ServerError("ERR too long")
    store.add("talk")

    @task("talk")
    async def talk(job: Job) -> None:
        await job.report(50)

    settings = Settings(backoff_ms=1, backoff_ms_max=2, settle_tries_max=2)
    worker = Worker([talk], queues=[store.open], settings=settings)
    async with serving(worker):
        await worker.watch.until("settled")
    assert (store.kinds(), store.code("talk-1")) == ({"talk-1": "fail"}, "store_answered_error")
    assert worker.watch.counts["lost"] == 0


async def test_a_report_waits_out_a_short_absence_of_the_store() -> None:
    store = Store()
    absences = 3

    def strike(_: object) -> StoreUnreachable | None:
        nonlocal absences
        absences -= 1
        return StoreUnreachable("away") if absences >= 0 else None

    store.before["report"] = strike
    store.add("talk")

    @task("talk")
    async def talk(job: Job) -> None:
        await job.report(50)

    worker = Worker([talk], queues=[store.open], settings=QUICK)
    async with serving(worker):
        await worker.watch.until("settled")
    assert store.kinds() == {"talk-1": "complete"}
    assert len(store.reports) == 1


async def test_an_outcome_that_the_store_can_never_take_fails_its_job_once() -> None:
    store = Store()

    def strike(outcomes: Sequence[Outcome]) -> UsageError | None:
        odd = any(o.lease.job_id == "noop-2" and o.kind == "complete" for o in outcomes)
        return UsageError("a result of 9 bytes is too long") if odd else None

    store.before["settle"] = strike
    store.add("noop", 3)
    await Worker([noop], queues=[store.open], settings=QUICK, burst=True).serve()
    assert store.kinds() == {"noop-1": "complete", "noop-2": "bury", "noop-3": "complete"}
    failure = store.outcomes["noop-2"].failure
    assert failure is not None
    assert (failure.code, failure.retryable) == ("outcome_refused", False)
    assert "9 bytes is too long" in failure.message


async def test_an_outcome_that_is_refused_for_good_only_once_is_kept() -> None:
    store = Store()
    refusals = [UsageError("404 of a proxy")]
    store.before["settle"] = lambda _: refusals.pop() if refusals else None
    store.add("noop")
    await Worker([noop], queues=[store.open], settings=QUICK, burst=True).serve()
    assert store.kinds() == {"noop-1": "complete"}


async def test_listeners_see_the_outcome_that_was_stored_instead_of_a_refused_one() -> None:
    store = Store()

    def strike(outcomes: Sequence[Outcome]) -> UsageError | None:
        odd = any(outcome.kind == "complete" for outcome in outcomes)
        return UsageError("too long") if odd else None

    store.before["settle"] = strike
    store.add("noop")
    codes: list[str] = []
    worker = Worker([noop], queues=[store.open], settings=QUICK, burst=True)
    worker.on("failed", lambda job, failure: codes.append(failure.code))
    await worker.serve()
    assert codes == ["outcome_refused"]
