"""Small parts of the gateway by themselves: gathering, limits, frames."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
from structlog.testing import capture_logs

from tenure.core.encoding import sse_comment
from tenure.core.errors import ReplyLost, StoreUnreachable
from tenure.core.job import JobEvent, JobRecord, NewJob, Submitted, position
from tenure.core.journal import JournalEvent
from tenure.gateway.feed import Feed
from tenure.gateway.http.connections import CoalescingTransport
from tenure.gateway.limits import FailedLogins, Quota, RateLimit, StreamLimit
from tenure.gateway.operations import SubmitBatcher
from tenure.gateway.problems import CODES, Problem
from tenure.gateway.sse import GONE, HEARTBEAT, frame


def job(name: str, size: int = 2) -> NewJob:
    return NewJob(task="chat", payload=b"x" * size, job_id=name)


class Slow:
    """A queue that answers when it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.go = asyncio.Semaphore(0)
        self.fails = False

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        self.batches.append([job.job_id for job in jobs])
        await self.go.acquire()
        if self.fails:
            raise ReplyLost("lost")
        return [Submitted(job.job_id, "created") for job in jobs]


async def until_sent(queue: Slow, batches: int) -> None:
    async with asyncio.timeout(5):
        while len(queue.batches) < batches:
            await asyncio.sleep(0)


async def test_what_arrives_during_one_submit_travels_with_the_next() -> None:
    queue = Slow()
    gathered = SubmitBatcher(queue)
    first = asyncio.create_task(gathered.submit([job("a")]))
    await until_sent(queue, 1)
    rest = [asyncio.create_task(gathered.submit([job(name)])) for name in "bcd"]
    await asyncio.sleep(0)
    queue.go.release()
    await until_sent(queue, 2)
    queue.go.release()
    answers = await asyncio.gather(first, *rest)
    assert queue.batches == [["a"], ["b", "c", "d"]]
    assert [answer[0].job_id for answer in answers] == ["a", "b", "c", "d"]


async def test_a_batch_is_bounded_in_number_and_size() -> None:
    queue = Slow()
    gathered = SubmitBatcher(queue)
    asked = [asyncio.create_task(gathered.submit([job(str(n))])) for n in range(150)]
    asked += [asyncio.create_task(gathered.submit([job(f"big{n}", 600_000)])) for n in range(4)]
    for _ in range(10):
        queue.go.release()
    await asyncio.gather(*asked)
    assert [len(batch) for batch in queue.batches] == [100, 51, 1, 1, 1]


async def test_an_error_reaches_everyone_whose_job_was_in_the_batch() -> None:
    queue = Slow()
    queue.fails = True
    gathered = SubmitBatcher(queue)
    asked = [asyncio.create_task(gathered.submit([job(name)])) for name in "ab"]
    queue.go.release()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [ReplyLost, ReplyLost]
    queue.fails = False
    queue.go.release()
    assert (await gathered.submit([job("c")]))[0].job_id == "c"


async def test_a_job_whose_client_left_before_it_was_sent_is_not_sent() -> None:
    queue = Slow()
    gathered = SubmitBatcher(queue)
    first = asyncio.create_task(gathered.submit([job("a")]))
    await until_sent(queue, 1)
    left = asyncio.create_task(gathered.submit([job("b")]))
    await asyncio.sleep(0)
    left.cancel()
    queue.go.release()
    await first
    queue.go.release()
    await gathered.submit([job("c")])
    assert queue.batches == [["a"], ["c"]]


async def test_lists_of_one_requester_do_not_delay_the_job_of_another() -> None:
    queue = Slow()
    gathered = SubmitBatcher(queue)

    def of(requester: str, count: int) -> list[NewJob]:
        return [NewJob(task="t", payload=b"{}", job_id=requester, requester=requester)] * count

    flood = [asyncio.create_task(gathered.submit(of("a", 480)))]
    await until_sent(queue, 1)
    flood += [asyncio.create_task(gathered.submit(of("a", 480))) for _ in range(20)]
    await asyncio.sleep(0)
    with pytest.raises(Problem) as refused:
        await gathered.submit(of("a", 480))
    assert (refused.value.code, refused.value.status) == ("rate_limited", 429)
    assert dict(refused.value.headers)["retry-after"] == "1"
    other = asyncio.create_task(gathered.submit(of("b", 1)))
    await asyncio.sleep(0)
    for _ in range(2):
        queue.go.release()
    await other
    assert queue.batches[:2] == [["a"] * 480, ["b"]]
    for _ in range(20):
        queue.go.release()
    await asyncio.gather(*flood)


class Held:
    """A ledger and journal of one job; the first reading answers only when it is told to."""

    def __init__(self) -> None:
        self.stored = [JobEvent(event_id="1-0", type="queued", ts_ms=1)]
        self.go = asyncio.Event()
        self.hold = True
        self.moved = asyncio.Event()

    async def get(self, job_id: str) -> JobRecord | None:
        return None

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        found = [event for event in self.stored if position(event.event_id) > position(after)]
        if self.hold and not after:
            self.hold = False
            await self.go.wait()
        return found

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        return {job_id: await self.events(job_id, after=after) for job_id, after in cursors.items()}

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        await self.moved.wait()
        self.moved.clear()
        return [JournalEvent(seq="9", contract="x", queue="x", job_id="j", type="report", ts_ms=1)]

    async def last(self) -> str:
        return ""

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        return []

    def since(self, ts_ms: int) -> str:
        return ""

    async def close(self) -> None:
        pass


async def test_a_client_whose_reading_was_overtaken_reads_once_more_at_once() -> None:
    """An event that the live clients have had already cannot wait for the next sweep."""
    held = Held()
    held.hold = False
    feed = Feed(held, held, final=("done",), sweep_ms=600_000, heartbeat_ms=600_000)
    feed.start()
    first = feed.subscribe("j", "")
    assert b"queued" in (await first.next() or b"")
    waiting = asyncio.create_task(first.next())
    held.hold = True
    late = feed.subscribe("j", "")
    reading = asyncio.create_task(late.next())
    async with asyncio.timeout(5):
        while held.hold:
            await asyncio.sleep(0)
        held.stored.append(JobEvent(event_id="2-0", type="progress", ts_ms=2))
        held.moved.set()
        assert b"id: 2-0" in (await waiting or b"")
        held.go.set()
        assert b"id: 1-0" in (await reading or b"")
        assert b"id: 2-0" in (await late.next() or b"")
    await feed.close()


async def test_a_client_that_catches_up_is_given_no_more_at_once_than_a_live_one() -> None:
    held, bytes_max = Held(), 10_000
    held.hold = False
    text = b'"%b"' % (b"x" * 3_000)
    held.stored = [
        JobEvent(event_id=f"{n}-0", type="token", ts_ms=n, data=text) for n in range(1, 41)
    ]
    feed = Feed(held, held, final=("done",), client_bytes_max=bytes_max)
    client = feed.subscribe("j", "")
    ids: list[bytes] = []
    async with asyncio.timeout(5):
        while not client.live:
            given = await client.next() or b""
            assert len(given) < bytes_max + 4_000
            ids += re.findall(rb"id: ([0-9]+)-0", given)
            if len(ids) == 40:
                break
    assert ids == [b"%d" % n for n in range(1, 41)]


class Replaced(Held):
    """A store in which another job has the id, though the journal has not said so."""

    async def get(self, job_id: str) -> JobRecord | None:
        return JobRecord(
            job_id=job_id, contract="x", queue="x", task="t", state="queued", requester="second"
        )


async def test_events_of_another_job_with_the_same_id_reach_no_earlier_follower() -> None:
    store = Replaced()
    store.hold = False
    feed = Feed(store, store, final=("done",), sweep_ms=600_000, heartbeat_ms=600_000)
    feed.start()
    live = feed.subscribe("j", "1-0", origin=("first", 0))
    async with asyncio.timeout(5):
        waiting = asyncio.create_task(live.next())
        while not live.live:
            await asyncio.sleep(0)
        store.stored.append(JobEvent(event_id="2-0", type="progress", ts_ms=2))
        store.moved.set()
        assert await waiting == GONE
        assert await feed.subscribe("j", "", origin=("first", 0)).next() == GONE
        own = await feed.subscribe("j", "", origin=("second", 0)).next()
        assert b"id: 2-0" in (own or b"")
    await feed.close()


class Away(Held):
    """A store that lets clients catch up and is gone whenever the sweep asks."""

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        raise StoreUnreachable("gone")


async def test_everyone_gets_heartbeats_while_the_store_is_away() -> None:
    """More clients than the sweep looks at in one step: none of its steps succeeds."""
    away = Away()
    away.hold = False
    feed = Feed(away, away, final=("done",), sweep_ms=20, heartbeat_ms=50)
    feed.start()
    clients = [feed.subscribe(f"j{number}", "") for number in range(120)]
    async with asyncio.timeout(20):
        for client in clients:
            assert b"queued" in (await client.next() or b"")
        for client in clients:
            assert HEARTBEAT in (await client.next() or b"")
    await feed.close()


def test_a_bucket_fills_at_its_rate_and_no_higher_than_its_burst() -> None:
    now = [0.0]
    limit, quota = RateLimit(clock_s=lambda: now[0]), Quota(rate_per_s=2, rate_burst=3)
    for _ in range(3):
        limit.take("k", quota)
    with pytest.raises(Problem) as refused:
        limit.take("k", quota)
    assert dict(refused.value.headers)["retry-after"] == "1"
    now[0] = 0.5
    limit.take("k", quota)
    now[0] = 1_000.0
    for _ in range(3):
        limit.take("k", quota)
    with pytest.raises(Problem):
        limit.take("k", quota)


def test_requesters_without_number_cost_bounded_memory() -> None:
    limit, quota = RateLimit(clock_s=lambda: 0.0), Quota(rate_per_s=1, rate_burst=1)
    for number in range(12_000):
        limit.take(str(number), quota)
    assert len(limit._buckets) == 10_000
    with pytest.raises(Problem):  # those who asked last are still known
        limit.take("11999", quota)


def test_failed_logins_are_limited_by_address_and_by_key_and_come_back() -> None:
    now = [0.0]
    failed = FailedLogins(6, clock_s=lambda: now[0])
    with capture_logs() as lines:
        for _ in range(6):
            failed.note("192.0.2.1", "k1", "api")
        for _ in range(20):
            with pytest.raises(Problem) as refused:
                failed.note("192.0.2.1", "k2", "api")
            assert dict(refused.value.headers)["retry-after"] == "10"
        with pytest.raises(Problem):  # the same key from elsewhere
            failed.note("192.0.2.2", "k1", "api")
        failed.note("192.0.2.2", "k2", "api")
    told = [(line["event"], line["address"]) for line in lines]
    one, two = "192.0.2.1", "192.0.2.2"
    assert told[:6] == [("login_failed", one)] * 6
    assert told[6:] == [("login_limited", one), ("login_limited", two), ("login_failed", two)]
    now[0] = 10.0
    failed.note("192.0.2.1", "k3", "api")


def test_an_ipv6_host_cannot_fail_from_addresses_without_number() -> None:
    failed = FailedLogins(2, clock_s=lambda: 0.0)
    failed.note("2001:db8::1", "", "api")
    failed.note("2001:db8::2", "", "api")
    with pytest.raises(Problem):
        failed.note("2001:db8::3", "", "api")
    failed.note("2001:db8:0:1::3", "", "api")


def test_the_anonymous_caller_may_open_any_number_of_streams() -> None:
    limit = StreamLimit()
    slot = partial(limit.slot, most=1)
    with slot(""), slot(""), slot("k"), pytest.raises(Problem), slot("k"):
        raise AssertionError("the second stream of a key is refused")
    with slot("k"):
        pass


@pytest.mark.parametrize("data", [b"", b"{}", b'{"a":\n1}', b"\xff", b"[[" * 5000, b'"\\u2028"'])
def test_a_frame_is_always_four_lines_whatever_the_data(data: bytes) -> None:
    event = JobEvent(event_id="1-0", type="a\r\nb\ndata: x", ts_ms=1, step="s\n\n", data=data)
    lines = frame(event).decode().split("\n")
    assert [line.partition(":")[0] for line in lines] == ["id", "event", "data", "", ""]
    assert "\r" not in frame(event).decode()
    assert sse_comment("a\n\nb") == b": a  b\n\n"


def test_every_problem_code_has_a_status_and_a_sentence() -> None:
    for code, (status, text) in CODES.items():
        assert 400 <= status <= 599, code
        assert text.endswith((".", "...")), code


class Wire:
    """A connection that keeps what was written to it."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


LENGTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_head_and_body_of_an_answer_leave_in_one_write() -> None:
    wire = Wire()
    joined = CoalescingTransport(wire, wire.close)  # type: ignore[arg-type]
    joined.write(LENGTHY)
    assert wire.writes == []
    joined.write(b"ok")
    assert wire.writes == [LENGTHY + b"ok"]


def test_the_head_of_a_stream_does_not_wait_for_its_first_event() -> None:
    wire = Wire()
    CoalescingTransport(wire, wire.close).write(ENDLESS)  # type: ignore[arg-type]
    assert wire.writes == [ENDLESS]


def test_a_connection_that_is_closed_has_sent_its_head() -> None:
    wire = Wire()
    joined = CoalescingTransport(wire, wire.close)  # type: ignore[arg-type]
    joined.write(LENGTHY)
    joined.close()
    assert (wire.writes, wire.closed) == ([LENGTHY], True)


def test_an_answer_to_a_client_that_left_is_not_written() -> None:
    wire = Wire()
    joined = CoalescingTransport(wire, wire.close)  # type: ignore[arg-type]
    wire.close()
    joined.write(ENDLESS)
    joined.close()
    assert wire.writes == []
