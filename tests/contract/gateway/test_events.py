"""Following jobs by server-sent events."""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import pytest

from tenure.core.job import NewJob
from tenure.core.outcome import Outcome
from tenure.gateway.settings import GatewaySettings
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import Following, SseEvent, Web
from tests.waiting import until


async def collect(following: Following, into: list[SseEvent]) -> None:
    async for event in following:  # one by one: the test looks at the list meanwhile
        into += [event]


async def foreign(site: Site, job_id: str, kind: str, data: str = "{}", step: str = "x") -> str:
    """An event as a worker of another make writes it: into the job's stream, without a journal."""
    key = f"{site.ns}job:{job_id}:events"
    fields = ("type", kind, "ts", 1, "step", step, "data", data)
    return str((await site.redis.call("XADD", key, "*", *fields)).decode())


@pytest.mark.clause("S-44", "S-46", "S-47", "S-48")
async def test_a_job_is_followed_from_hello_to_done(site: Site, web: Web) -> None:
    job_id = await web.submit()
    following = await web.follow(job_id)
    assert following.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert following.headers["cache-control"] == "no-store, no-transform"
    lease = await site.claim()
    await site.tell(lease, "half", b'{"pct":50,"text":"line\\nbreak"}')
    await site.finish(lease)
    hello, *events = await following.all()
    assert (hello.name, hello.retry, hello.id) == ("hello", 2000, "")
    assert hello.json == {"job_id": job_id, "status": "queued"}
    assert [event.name for event in events] == ["queued", "running", "progress", "done"]
    stored = await site.ledger.events(job_id)
    assert [event.id for event in events] == [event.event_id for event in stored]
    assert events[2].json == {
        "type": "progress",
        "ts": stored[2].ts_ms,
        "step": "half",
        "data": {"pct": 50, "text": "line\nbreak"},
    }


@pytest.mark.clause("S-47")
@pytest.mark.parametrize("end", ["done", "error", "canceled"])
async def test_a_finished_job_is_replayed_and_ends(site: Site, web: Web, end: str) -> None:
    job_id = await web.submit()
    if end == "canceled":
        await web.post(f"/v1/jobs/{job_id}/cancel")
    else:
        await site.claim()
        await foreign(site, job_id, end)
    events = await (await web.follow(job_id)).all()
    assert events[-1].name == end
    assert events[1].name == "queued"


@pytest.mark.clause("S-48")
async def test_a_client_that_has_everything_is_told_not_to_come_back(site: Site, web: Web) -> None:
    job_id = await web.submit()
    await web.post(f"/v1/jobs/{job_id}/cancel")
    last = (await site.ledger.events(job_id))[-1].event_id
    path = f"/v1/jobs/{job_id}/events"
    assert (await web.get(path, last_event_id=last)).status == 204
    assert (await web.get(f"{path}?last_event_id={last}")).status == 204


@pytest.mark.clause("S-48", "S-49")
@pytest.mark.parametrize(
    "bad", ["$", "1", "-1-0", "1-2-3", "x-y", "1-0 ", "99999999999999999999-0"]
)
async def test_a_position_that_is_none_is_refused(web: Web, bad: str) -> None:
    job_id = await web.submit()
    quoted = bad.replace(" ", "%20").replace("$", "%24")
    reply = await web.get(f"/v1/jobs/{job_id}/events?last_event_id={quoted}")
    is_problem(reply, 400, "bad_cursor")


@pytest.mark.clause("S-48")
async def test_the_header_wins_over_the_parameter(site: Site, web: Web) -> None:
    job_id = await web.submit()
    await web.post(f"/v1/jobs/{job_id}/cancel")
    first = (await site.ledger.events(job_id))[0].event_id
    following = await web.follow(job_id, "?last_event_id=0-0", last_event_id=first)
    assert [event.name for event in await following.all()] == ["hello", "canceled"]


@pytest.mark.clause("S-48")
async def test_reconnecting_anywhere_never_loses_or_repeats_an_event(site: Site) -> None:
    """Clients that break off at random places see each event exactly once, in order."""
    web = await site.web(sweep_ms=100)
    job_id = await web.submit()
    random_ = random.Random(7)

    async def client(seed: int) -> list[str]:
        chance = random.Random(seed)
        seen: list[str] = []
        while True:
            after = {"last_event_id": seen[-1]} if seen else {}
            following = await web.follow(job_id, **after)
            patience = chance.randrange(1, 25)
            async for event in following:
                if event.id:
                    seen.append(event.id)
                if event.name == "done":
                    return seen
                patience -= 1
                if not patience:
                    following.abort() if chance.random() < 0.5 else following.close()
                    break

    clients = [asyncio.create_task(client(seed)) for seed in range(12)]
    lease = await site.claim()
    for number in range(150):
        if number % 3 == 0:
            await foreign(site, job_id, "progress", f'{{"n":{number}}}')
        else:
            await site.tell(lease, f"step {number}")
        await asyncio.sleep(random_.random() * 0.01)
    await site.finish(lease)
    async with asyncio.timeout(30):
        seen = await asyncio.gather(*clients)
    told = [event.event_id for event in await site.ledger.events(job_id)]
    assert len(told) == 153
    assert all(each == told for each in seen)


@pytest.mark.clause("S-48")
async def test_a_long_history_is_replayed_whole_and_then_goes_on(site: Site, web: Web) -> None:
    job_id = await web.submit()
    key = f"{site.ns}job:{job_id}:events"
    fields = ("type", "progress", "ts", 1, "step", "s", "data", "{}")
    await site.redis.pipeline([("XADD", key, "*", *fields)] * 2300)
    following = await web.follow(job_id)
    seen: list[SseEvent] = []
    reading = asyncio.create_task(collect(following, seen))

    async def caught_up() -> bool:
        return len(seen) == 2302

    await until(caught_up)
    lease = await site.claim()
    await site.finish(lease)
    await asyncio.wait_for(reading, 10)
    assert [event.id for event in seen[1:]] == [
        event.event_id for event in await site.ledger.events(job_id, limit=5000)
    ]


async def test_events_of_foreign_workers_arrive_without_a_journal(site: Site) -> None:
    web = await site.web(sweep_ms=50)
    job_id = await web.submit()
    following = await web.follow(job_id)
    await foreign(site, job_id, "running")
    await foreign(site, job_id, "token", "not json\nat all", step="a\nb")
    await foreign(site, job_id, "od\nd")
    await foreign(site, job_id, "done", "")
    events = await following.all()
    names = [event.name for event in events]
    assert names == ["hello", "queued", "running", "token", "od d", "done"]
    assert events[3].json["data"] == {"_raw": "not json\nat all"}
    assert events[5].json["data"] == {}


@pytest.mark.alone
@pytest.mark.clause("S-39")
@pytest.mark.parametrize("others", [0, 400], ids=["alone", "among 400"])
async def test_events_of_foreign_workers_arrive_at_once(site: Site, others: int) -> None:
    """No round over all jobs helps here; with many followers it takes a foreign consumer."""
    web = await site.web(sweep_ms=1_000)
    job_id = await web.submit()
    stream = f"{site.ns}jobs:stream"
    await site.redis.call("XGROUP", "CREATE", stream, "workers", "0", "MKSTREAM")
    await site.redis.call("XGROUP", "CREATECONSUMER", stream, "workers", "foreign")
    idle = [await web.follow(await web.submit()) for _ in range(others)]
    following = await web.follow(job_id)
    sent: dict[str, float] = {}
    heard: dict[str, float] = {}

    async def listen() -> None:
        async for event in following:
            heard[event.id] = time.perf_counter()

    listening = asyncio.create_task(listen())
    for number in range(70):
        await asyncio.sleep(0.02 + random.random() / 50)  # events come when they come
        began = time.perf_counter()
        sent[await foreign(site, job_id, "done" if number == 69 else "progress")] = began
    await asyncio.wait_for(listening, 10)
    for each in idle:
        each.close()
    late_ms = [(heard[event_id] - began) * 1000 for event_id, began in sent.items()]
    assert statistics.median(late_ms) < 20, sorted(late_ms)


@pytest.mark.clause("S-39")
async def test_a_job_that_is_followed_later_is_waited_for_too(site: Site) -> None:
    """The reader that blocks on some jobs begins anew when there is one more."""
    web = await site.web(sweep_ms=600_000, heartbeat_ms=600_000)
    first, second = await web.submit(), await web.submit()
    followings = [await web.follow(first)]
    assert (await anext(aiter(followings[0]))).name == "hello"
    followings.append(await web.follow(second))
    for job_id in (second, first):
        await foreign(site, job_id, "done")
    for following in followings:
        assert (await following.all(timeout_s=5))[-1].name == "done"


@pytest.mark.clause("S-39")
async def test_a_job_that_a_worker_of_ours_let_go_is_waited_for_again(site: Site) -> None:
    """Its next events may be written by a worker that knows no journal."""
    web = await site.web(sweep_ms=600_000, heartbeat_ms=600_000)
    job_id = await web.submit()
    following = await web.follow(job_id)
    seen: list[SseEvent] = []
    reading = asyncio.create_task(collect(following, seen))

    async def heard(name: str) -> bool:
        return name in [event.name for event in seen]

    lease = await site.claim()
    await until(lambda: heard("running"))
    await asyncio.sleep(2.5)  # the wait that began while the job was nobody's has ended
    before = len(seen)
    await site.worker.settle([Outcome(lease, "release")])

    async def let_go() -> bool:
        return len(seen) > before

    await until(let_go)
    await foreign(site, job_id, "done")
    await asyncio.wait_for(reading, 5)
    assert seen[-1].name == "done"


@pytest.mark.clause("S-37")
@pytest.mark.parametrize("ending", ["", ":events"])
async def test_a_job_that_cannot_be_read_is_answered_as_an_error(site: Site, ending: str) -> None:
    web = await site.web(heartbeat_ms=100)
    job_id, good = await web.submit(), await web.submit()
    key = f"{site.ns}job:{job_id}{ending}"
    await site.redis.call("DEL", key)
    await site.redis.call("RPUSH", key, "x")
    reply = await web.get(f"/v1/jobs/{job_id}")
    assert reply.status == 200
    if not ending:
        assert reply.json["status"] == "error"
        assert reply.json["error"]["code"] == "unreadable"
    page = (await web.get("/v1/jobs")).json["jobs"]
    assert {job["job_id"] for job in page} == {job_id, good}
    assert (await (await web.follow(job_id)).all(timeout_s=5))[0].name == "hello"
    assert (await web.post(f"/v1/jobs/{job_id}/cancel")).status in (200, 409)
    await site.finish(await site.claim())
    assert (await (await web.follow(good)).all(timeout_s=5))[-1].name == "done"


@pytest.mark.clause("S-45")
async def test_heartbeats_are_sent_while_nothing_happens(site: Site) -> None:
    web = await site.web(heartbeat_ms=100)
    job_id = await web.submit()
    following = await web.follow(job_id)
    beats = 0
    async with asyncio.timeout(10):
        async for event in following:
            beats += event.name == ":" and event.data == "heartbeat"
            if beats == 3:
                break
    following.close()
    assert GatewaySettings(queues=("x",)).heartbeat_ms == 15_000


async def test_the_stream_of_an_expired_job_ends(site: Site) -> None:
    web = await site.web(heartbeat_ms=200)
    job_id = await web.submit()
    following = await web.follow(job_id)
    await site.redis.call("DEL", f"{site.ns}job:{job_id}", f"{site.ns}job:{job_id}:events")
    events = await following.all()
    assert (events[-1].name, events[-1].id) == ("expired", "")
    assert (await web.get(f"/v1/jobs/{job_id}/events")).status == 404


async def test_a_job_that_ended_without_an_event_does_not_hang_its_followers(
    site: Site,
) -> None:
    web = await site.web(heartbeat_ms=100)
    job_id = await web.submit()
    following = await web.follow(job_id)
    await site.redis.call("HSET", f"{site.ns}job:{job_id}", "status", "error")
    events = await following.all()
    assert events[-1].name == "error"
    assert events[-1].json["step"] == "gateway.observed"
    assert events[-1].id == ""


async def test_a_position_in_the_future_harms_nobody_else(site: Site) -> None:
    web = await site.web(heartbeat_ms=200, sweep_ms=50)
    job_id = await web.submit()
    odd = await web.follow(job_id, last_event_id="9999999999999-0")
    honest = await web.follow(job_id)
    lease = await site.claim()
    await site.tell(lease, "half")
    await site.finish(lease)
    names = [event.name for event in await honest.all()]
    assert names == ["hello", "queued", "running", "progress", "done"]
    assert [event.name for event in await odd.all()] == ["hello", "done"]


async def test_two_hundred_clients_all_see_everything(site: Site) -> None:
    web = await site.web()
    jobs = [await web.submit() for _ in range(20)]
    followings = [await web.follow(job_id) for job_id in jobs for _ in range(10)]
    readers = [asyncio.create_task(following.all()) for following in followings]
    leases = []
    while len(leases) < 20:
        leases += await site.worker.claim(20, wait_ms=1000)
    for step in range(5):
        for lease in leases:
            await site.tell(lease, f"step {step}")
    for lease in leases:
        await site.finish(lease)
    for events in await asyncio.wait_for(asyncio.gather(*readers), 30):
        names = [event.name for event in events]
        assert names == ["hello", "queued", "running", *["progress"] * 5, "done"]


async def test_news_reach_a_client_within_milliseconds_not_sweeps(site: Site) -> None:
    """With a sweep only once a minute, events can arrive only through the journal."""
    web = await site.web(sweep_ms=60_000, heartbeat_ms=600_000)
    jobs = [await web.submit(), await web.submit()]
    first = await web.follow(jobs[0])
    leases = [await site.claim(), await site.claim()]
    seen: list[SseEvent] = []
    reading = asyncio.create_task(collect(first, seen))

    async def running() -> bool:
        await site.tell(leases[0], "again")
        return any(event.name == "progress" for event in seen)

    await until(running, within_s=5)  # the tail is on from here
    second = await web.follow(jobs[1])
    await site.tell(leases[1], "now")
    await site.finish(leases[0])
    await site.finish(leases[1])
    assert [event.name for event in await second.all(5)][-2:] == ["progress", "done"]
    await asyncio.wait_for(reading, 5)
    assert seen[-1].name == "done"


async def test_a_client_that_does_not_read_is_cut_off_and_can_resume(site: Site) -> None:
    gateway = await site.gateway(client_bytes_max=100_000, sweep_ms=50)
    web = Web(gateway.url)
    job_id = await web.submit()
    lazy = await web.follow(job_id)
    feed = gateway.gateway.queues[0].feed

    async def dropped() -> bool:
        await foreign(site, job_id, "token", '{"text":"%s"}' % ("x" * 50_000))
        return "tenure_sse_slow_clients_total 1.0" in (await web.get("/metrics")).body.decode()

    await until(dropped, within_s=30)

    async def gone() -> bool:
        return feed.clients == 0

    seen: list[SseEvent] = []
    reading = asyncio.create_task(collect(lazy, seen))
    await until(gone, within_s=15)
    await asyncio.wait_for(reading, 10)
    ids = [event.id for event in seen if event.id]
    await foreign(site, job_id, "done")
    rest = await (await web.follow(job_id, last_event_id=ids[-1])).all()
    told: list[str] = []
    while page := await site.ledger.events(job_id, after=told[-1] if told else ""):
        told += [event.event_id for event in page]
    assert ids + [event.id for event in rest if event.id] == told
    assert len(ids) < len(told)


async def test_a_client_that_leaves_is_forgotten(site: Site) -> None:
    gateway = await site.gateway()
    web = Web(gateway.url)
    job_id = await web.submit()
    followings = [await web.follow(job_id) for _ in range(5)]
    feed = gateway.gateway.queues[0].feed

    async def all_there() -> bool:
        return feed.clients == 5

    await until(all_there)
    for following in followings:
        following.abort()

    async def none_there() -> bool:
        return feed.clients == 0

    await until(none_there)
    assert "tenure_sse_clients 0.0" in (await web.get("/metrics")).body.decode()


async def test_a_reopened_job_is_followed_on_from_its_first_end(site: Site, web: Web) -> None:
    job_id = await web.submit()
    await site.finish(await site.claim())
    first_end = (await site.ledger.events(job_id))[-1].event_id
    assert await site.ledger.retry([job_id]) == ["ok"]
    following = await web.follow(job_id, last_event_id=first_end)
    await site.finish(await site.claim())
    names = [event.name for event in await following.all()]
    assert names == ["hello", "queued", "running", "done"]


@pytest.mark.parametrize("how", ["wrong type", "no text"])
async def test_one_unreadable_job_does_not_silence_the_others(site: Site, how: str) -> None:
    web = await site.web(sweep_ms=50)
    broken, *sound = [await web.submit() for _ in range(4)]
    doomed = await web.follow(broken)
    others = [await web.follow(job_id) for job_id in sound]
    key = f"{site.ns}job:{broken}:events"
    if how == "wrong type":
        await site.redis.pipeline([("DEL", key), ("SET", key, "not a stream")])
    else:
        fields = (b"type", b"\xff\xfe", "ts", "x", "step", b"\xff", "data", b"\xff")
        await site.redis.call("XADD", key, "*", *fields)
    for job_id in sound:
        await foreign(site, job_id, "done")
    for other in others:
        assert [event.name for event in await other.all()] == ["hello", "queued", "done"]
    if how == "wrong type":
        async with asyncio.timeout(5):
            assert [event async for event in doomed][
                -1
            ].data == "the events of this job cannot be read"
    else:
        doomed.close()


async def test_a_flood_of_other_jobs_does_not_drown_the_followed_ones(site: Site) -> None:
    """More journal than the gateway wants to read: it skips, and still misses nothing."""
    web = await site.web(sweep_ms=60_000, heartbeat_ms=600_000)
    job_id = await web.submit()
    following = await web.follow(job_id)
    seen: list[SseEvent] = []
    reading = asyncio.create_task(collect(following, seen))
    lease = await site.claim()

    async def tailing() -> bool:
        await site.tell(lease, "awake?")
        return any(event.name == "progress" for event in seen)

    await until(tailing)
    others = [NewJob(task="chat", payload=b"{}")] * 2000
    for turn in range(8):
        await site.worker.submit(others)
        await site.tell(lease, f"step {turn}")
    await site.finish(lease)
    await asyncio.wait_for(reading, 20)
    told = [event.event_id for event in await site.ledger.events(job_id, limit=5000)]
    assert [event.id for event in seen if event.id] == told
