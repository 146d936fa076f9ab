"""/api for every contract: searching, acting, who may, and what is written down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tenure import Client
from tenure.cli.monitor import open_queues
from tenure.core.job import NewJob
from tenure.core.outcome import Failure, Outcome
from tenure.core.portable import state_of
from tenure.core.redaction import Redaction
from tenure.core.registry import contract_names, open_queue
from tenure.dashboard.finder import JobFinder
from tenure.dashboard.views import overdue
from tenure.dashboard.watch import JournalWatch
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.adapters import Servers, Stage, adapters, served_url
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.web import Web
from tests.contract.stages import Staffing
from tests.contract.unwanted import given_up
from tests.waiting import until

SERVED = [
    name
    for name in adapters(Servers())
    if name == "streams_shards" or (name in contract_names() and name != "memory")
]
FORM = {"content-type": "application/x-www-form-urlencoded"}


class Place:
    """One queue of one contract behind a gateway."""

    def __init__(self, stage: Stage, web: Web, name: str) -> None:
        self.stage = stage
        self.web = web
        self.name = name

    async def submit(self, count: int, task: str = "a", payload: bytes = b"{}") -> list[str]:
        queue = open_queue(served_url(self.stage))
        jobs = [NewJob(task=task, payload=payload) for _ in range(count)]
        try:
            return [made.job_id for made in await queue.submit(jobs)]
        finally:
            await queue.close()

    async def find(self, q: str, **params: Any) -> list[dict[str, Any]]:
        extra = "".join(f"&{name}={value}" for name, value in params.items())
        reply = await self.web.get(f"/api/jobs?q={q.replace(' ', '+')}{extra}")
        assert reply.status == 200, reply.body
        return list(reply.json["jobs"])


@pytest.fixture(params=SERVED)
async def place(request: pytest.FixtureRequest, servers: Servers) -> AsyncGenerator[Place]:
    stage = await adapters(servers)[request.param].open(lease_ms=10_000)
    try:
        async with serving(GatewaySettings(queues=(served_url(stage),), port=0)) as running:
            yield Place(stage, Web(running.url), running.gateway.queues[0].name)
    finally:
        await stage.close()


async def test_jobs_of_any_contract_are_searched_paged_and_counted(place: Place) -> None:
    made = await place.submit(23) + await place.submit(4, task="b")
    assert {job["job_id"] for job in await place.find("")} == set(made)
    assert len(await place.find("task:b is:waiting")) == 4
    assert await place.find("is:done") == []
    assert (await place.web.get("/api/jobs/count?q=task:a")).json == {"jobs": 23, "exact": True}
    seen: list[str] = []
    after = ""
    while True:
        page = (await place.web.get(f"/api/jobs?q=task:a&limit=5&after={after}")).json
        seen += [job["job_id"] for job in page["jobs"]]
        after = page["after"]
        if not after:
            break
    assert sorted(seen) == sorted(made[:23])


async def test_paging_survives_the_removal_of_what_was_seen(place: Place) -> None:
    made = await place.submit(12)
    first = (await place.web.get("/api/jobs?limit=5")).json
    gone = [job["job_id"] for job in first["jobs"]]
    reply = await place.web.post(f"/api/queues/{place.name}/remove", {"job_ids": gone})
    assert set(reply.json["answers"].values()) == {"ok"}
    rest = (await place.web.get(f"/api/jobs?limit=50&after={first['after']}")).json
    assert sorted(gone + [job["job_id"] for job in rest["jobs"]]) == sorted(made)


async def test_one_job_is_read_with_its_secrets_masked(place: Place) -> None:
    (job_id,) = await place.submit(1, payload=b'{"token":"t-1","n":1}')
    job = (await place.web.get(f"/api/queues/{place.name}/jobs/{job_id}")).json
    assert job["payload"] == {"token": "•••", "n": 1}
    assert job["state"] == "waiting"
    events = (await place.web.get(f"/api/queues/{place.name}/jobs/{job_id}/events")).json
    assert events["events"][0]["ts_ms"] > 0


async def test_a_masked_value_cannot_be_guessed_by_searching(place: Place) -> None:
    await place.submit(1, payload=b'{"token":"t-1","n":1}')
    assert len(await place.find("payload.n=1")) == 1
    assert await place.find("payload.token=t*") == []
    assert await place.find("t-1") == []


async def test_a_job_is_submitted_to_any_queue(place: Place) -> None:
    body = {"task": "greet", "payload": {"name": "Ada"}, "max_attempts": 2}
    made = await place.web.post(f"/api/queues/{place.name}/jobs", body)
    assert made.status == 201
    job = await place.stage.ledger.get(made.json["job_id"])
    assert job is not None
    assert (job.task, job.payload) == ("greet", b'{"name":"Ada"}')


async def test_an_action_on_a_search_meets_every_job_in_it_and_no_other(place: Place) -> None:
    await place.submit(450)
    kept = await place.submit(3, task="b")
    begun = await place.web.post("/api/bulk", {"action": "remove", "q": "task:a"})
    assert (begun.status, begun.json["total"]) == (202, 450)

    async def over() -> bool:
        return bool(
            (await place.web.get(f"/api/bulk/{begun.json['id']}")).json["state"] != "running"
        )

    await until(over, within_s=30)
    end = (await place.web.get(f"/api/bulk/{begun.json['id']}")).json
    assert (end["state"], end["done"], end["answers"]) == ("finished", 450, {"ok": 450})
    assert {job["job_id"] for job in await place.find("")} == set(kept)


async def test_an_action_that_is_stopped_leaves_the_rest_as_it_is(place: Place) -> None:
    await place.submit(1_200)
    begun = (await place.web.post("/api/bulk", {"action": "remove", "q": "task:a"})).json
    await place.web.post(f"/api/bulk/{begun['id']}/stop")

    async def over() -> bool:
        state = (await place.web.get(f"/api/bulk/{begun['id']}")).json
        return bool(state["state"] == "stopped")

    await until(over, within_s=30)
    end = (await place.web.get(f"/api/bulk/{begun['id']}")).json
    left = (await place.web.get("/api/jobs/count?q=task:a")).json["jobs"]
    assert left == 1_200 - end["done"] > 0
    assert (await place.web.post("/api/bulk/none/stop")).status == 404


async def test_an_action_is_refused_when_more_jobs_match_than_were_seen(place: Place) -> None:
    await place.submit(3)
    body = {"action": "cancel", "q": "task:a", "expect": 2}
    refused = await place.web.post("/api/bulk", body)
    assert refused.status == 409
    assert "3 jobs match by now" in refused.json["detail"]
    assert all(job["state"] == "waiting" for job in await place.find(""))


@pytest.mark.clause("I-44")
async def test_what_was_done_is_written_down_and_outlives_the_gateway(
    place: Place,
) -> None:
    (job_id,) = await place.submit(1)
    await place.web.post(f"/api/queues/{place.name}/pause")
    await place.web.post(f"/api/queues/{place.name}/cancel", {"job_ids": [job_id]})
    listed = (await place.web.get("/api/audit")).json["entries"]
    # All queues of a Redis share its log, as they share its keys.
    entries = [entry for entry in listed if entry["queue"] == place.name]
    assert [(e["action"], e["queue"], e["who"]) for e in entries] == [
        ("cancel", place.name, "local"), ("pause", place.name, "local"),
    ]  # fmt: skip
    assert entries[0]["ids"] == [job_id]
    older = await place.web.get(f"/api/audit?before={entries[0]['id']}")
    assert older.json["entries"] == listed[listed.index(entries[0]) + 1 :]
    async with serving(GatewaySettings(queues=(served_url(place.stage),), port=0)) as another:
        told = (await Web(another.url).get("/api/audit")).json["entries"]
    assert [entry for entry in told if entry["queue"] == place.name] == entries


async def test_a_scaler_reads_the_backlog_of_any_contract(place: Place) -> None:
    await place.submit(25)
    found = (await place.web.get(f"/api/autoscale/{place.name}?per_worker=10")).json
    assert (found["backlog"], found["desired"]) == (25, 3)


async def test_workers_are_seen_with_what_they_hold(place: Place) -> None:
    await place.submit(1)
    queue = open_queue(place.stage.url, worker_id="w-7")
    try:
        assert await queue.claim(1, wait_ms=2_000)
        workers = (await place.web.get("/api/workers")).json["workers"]
    finally:
        await queue.close()
    held = [(worker["worker_id"], [job["task"] for job in worker["jobs"]]) for worker in workers]
    assert ("w-7", ["a"]) in held


async def test_schedules_are_listed_and_shown(place: Place) -> None:
    async with Client(served_url(place.stage)) as client:
        made = await client.schedule("report", {"key": "unseen"}, cron="0 3 * * *", name="nightly")
    (shown,) = (await place.web.get("/api/schedules")).json["schedules"]
    assert (shown["name"], shown["task"], shown["times"]) == ("nightly", "report", "0 3 * * *")
    assert (shown["queue"], shown["next_ms"], shown["tz"]) == (place.name, made.next_ms, "UTC")
    page = (await place.web.get("/queues")).body.decode()
    assert "nightly" in page
    assert "0 3 * * *" in page
    assert "unseen" not in page


async def test_figures_follow_the_journal(place: Place) -> None:
    await place.web.get("/api/stats")
    await place.submit(5)

    async def counted() -> bool:
        return bool((await place.web.get("/api/stats")).json["total"]["submitted"] == 5)

    await until(counted)


async def test_the_first_look_sees_the_last_minutes_and_a_later_one_counts_none_twice(
    place: Place,
) -> None:
    await place.submit(5)
    async with open_queues([served_url(place.stage)]) as street:
        watch = JournalWatch(street)
        (observer,) = watch.observers.values()
        for _ in range(2):  # it stops when nobody looks, and begins again
            observer.start()
            await watch.wait_caught_up(within_s=20)
            assert (observer.caught_up.is_set(), watch.figures().submitted) == (True, 5)
            await observer.stop()
    reply = await place.web.get("/api/stats")
    assert reply.json["total"]["submitted"] == 5


async def test_who_may_only_observe_cannot_act(site: Site) -> None:
    ring = open_keyring(site.url())
    texts = {
        scope: (await ring.create([scope], scope))[1] for scope in ("observe", "jobs:read", "admin")
    }
    await ring.close()
    url = (await site.gateway()).url
    by = {scope: Web(url, {"x-api-key": text}) for scope, text in texts.items()}
    for path in ("/api/jobs", "/api/workers", "/api/dead", "/api/audit", "/api/stats"):
        assert (await by["observe"].get(path)).status == 200, path
        assert (await by["admin"].get(path)).status == 200, path
        assert (await by["jobs:read"].get(path)).status == 403, path
    assert (await by["observe"].get("/api/autoscale/streams")).status == 200
    for path in ("/api/queues/streams/pause", "/api/queues/streams/retry", "/api/bulk"):
        body = {"job_ids": ["x"]} if path.endswith("retry") else {"action": "retry", "q": "x"}
        assert (await by["observe"].post(path, body)).status == 403, path
    who = (await by["admin"].post("/api/queues/streams/pause")).status
    assert who == 200
    entries = (await by["observe"].get("/api/audit")).json["entries"]
    assert [entry["who"] for entry in entries] == [texts["admin"].split("_")[1]]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "same-origin"}, 303),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "none"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({}, 403),
    ],
)
async def test_a_form_has_to_come_from_our_own_page(
    site: Site, headers: dict[str, str], status: int
) -> None:
    web = await site.web()
    body = b"verb=pause&queue=streams"
    reply = await web.send("POST", "/ui/queue", body, {**FORM, **headers})
    assert reply.status == status
    assert (await site.ledger.counts()).paused == (status == 303)


async def test_a_session_ends_with_its_key(site: Site) -> None:
    ring = open_keyring(site.url())
    key, text = await ring.create(["observe"], "me")
    web = await site.web()
    own = {"sec-fetch-site": "same-origin"}
    made = await web.send("POST", "/login", f"key={text}".encode(), {**FORM, **own})
    cookie = {"cookie": made.headers["set-cookie"].partition(";")[0]}
    assert (await web.send("GET", "/jobs", headers=cookie)).status == 200
    forged = {"cookie": cookie["cookie"][:-4] + "0000"}
    assert (await web.send("GET", "/jobs", headers=forged)).status == 303
    # A cookie is for pages; programs show their key.
    assert (await web.send("GET", "/api/jobs", headers=cookie)).status == 401
    await ring.revoke(key.id)
    await ring.close()

    async def out() -> bool:
        return (await web.send("GET", "/jobs", headers=cookie)).status == 303

    await until(out)


async def test_the_pulse_tells_what_moved_and_ends_when_the_gateway_goes(site: Site) -> None:
    running = await site.gateway()
    web = Web(running.url)
    async with asyncio.timeout(20):
        names = []
        async for event in await web.stream("/live"):
            names.append(event.name)
            if event.name == "series":
                job_id = await web.submit()
            elif event.name == "tick" and ["streams", job_id] in event.json["moved"]:
                running.gateway.drain()
    assert names[0] == "series"
    job = await site.ledger.get(job_id)
    assert job is not None
    assert state_of(job) == "waiting"


async def test_the_overview_warns_of_a_queue_without_workers_and_a_store_that_forgets(
    site: Site,
) -> None:
    web = await site.web()
    await web.submit()
    await site.redis.call("CONFIG", "SET", "appendonly", "no")
    try:
        text = (await web.get("/")).body.decode()
    finally:
        await site.redis.call("CONFIG", "SET", "appendonly", "yes")
    assert "no worker, and 1 jobs wait" in text
    assert "appendonly is off" in text


async def test_the_overview_warns_of_a_queue_of_any_contract_that_nobody_works(
    place: Place,
) -> None:
    await place.submit(2)
    text = (await place.web.get("/")).body.decode()
    assert "no worker, and 2 jobs wait" in text
    await place.web.post(f"/api/queues/{place.name}/pause")
    text = (await place.web.get("/")).body.decode()
    assert "paused, 2 jobs wait" in text


@pytest.mark.parametrize("contract", SERVED)
async def test_leases_that_nobody_takes_back_are_told_of_in_any_contract(
    contract: str, servers: Servers
) -> None:
    stage = await adapters(servers)[contract].open(lease_ms=300)
    queue = open_queue(stage.url, worker_id="w-dead")
    try:
        await queue.submit([NewJob(task="a", payload=b"{}")])
        assert await queue.claim(1, wait_ms=2_000)
        if contract != "plane":  # a plane takes back by itself what ran out
            await stage.advance(400)
        async with open_queues([served_url(stage)]) as street:
            finder = JobFinder(street, Redaction())
            now_ms = time.time_ns() // 1_000_000
            assert await overdue(finder, now_ms=now_ms) == []
            (warn,) = await overdue(finder, now_ms=now_ms + 60_000)
            assert "1 leases ran out and nobody took the jobs back" in warn.text
            assert "start a worker" in warn.remedy
    finally:
        await queue.close()
        await stage.close()


async def test_dead_letters_of_any_contract_are_grouped_by_error_class(place: Place) -> None:
    await place.submit(3)
    queue = open_queue(place.stage.url, worker_id="w-1")
    try:
        leases = []
        async with asyncio.timeout(20):
            while len(leases) < 3:
                leases += await queue.claim(3 - len(leases), wait_ms=500)
        for lease, code in zip(leases, ("Timeout", "Timeout", "KeyError"), strict=True):
            failure = Failure(code=code, message=f"{code} happened")
            await queue.settle([Outcome(lease, "bury", failure=failure)])
    finally:
        await queue.close()
    found = (await place.web.get("/api/dead")).json
    groups = [(group["error_class"], group["jobs"]) for group in found["groups"]]
    assert (groups, found["complete"]) == ([("Timeout", 2), ("KeyError", 1)], True)
    body = {"action": "retry", "q": "is:failed error:Timeout", "expect": 2}
    begun = (await place.web.post("/api/bulk", body)).json

    async def over() -> bool:
        state = (await place.web.get(f"/api/bulk/{begun['id']}")).json
        return bool(state["state"] == "finished" and state["answers"] == {"ok": 2})

    await until(over, within_s=20)
    assert len(await place.find("is:waiting")) == 2


async def test_a_worker_with_nothing_to_do_is_seen(place: Place) -> None:
    queue = open_queue(place.stage.url, worker_id="w-idle")
    try:
        assert isinstance(queue, Staffing)
        queue.slots = 12
        await queue.claim(1, wait_ms=10)
        await queue.upkeep()  # as a worker does, once a second
        workers = (await place.web.get("/api/workers")).json["workers"]
    finally:
        await queue.close()
    told = [(worker["worker_id"], worker["slots"], worker["jobs"]) for worker in workers]
    assert told == [("w-idle", 12, [])]
    assert workers[0]["last_ms"] > 0


async def test_events_of_an_outbox_are_listed_and_sent_again_by_whoever_may(
    tmp_path: Path,
) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db?keep_ms=60000"
    event_id = await given_up(url)
    ring = open_keyring(url)
    texts = {scope: (await ring.create([scope], scope))[1] for scope in ("observe", "admin")}
    await ring.close()
    path = "/api/queues/inbox/outbox"
    async with serving(GatewaySettings(queues=(url,), port=0)) as running:
        sees, acts = (Web(running.url, {"x-api-key": texts[who]}) for who in ("observe", "admin"))
        assert (await sees.get("/api/outboxes")).json == {"queues": ["inbox"]}
        (event,) = (await sees.get(f"{path}?kind=failed")).json["events"]
        assert (event["event_id"], event["state"], event["answer"]) == (
            event_id, "failed", "410 Gone",
        )  # fmt: skip
        assert event["to"] == "https://hooks.example/jobs"
        assert (await sees.get(f"{path}?kind=done")).json["events"] == []
        again = f"{path}/redeliver"
        assert (await sees.post(again, {"event_ids": [event_id]})).status == 403
        reply = await acts.post(again, {"event_ids": [event_id, "nothing.1"]})
        assert reply.json == {"answers": {event_id: "ok", "nothing.1": "missing"}}
        (event,) = (await sees.get(f"{path}?kind=waiting")).json["events"]
        assert event["event_id"] == event_id
        (entry,) = (await sees.get("/api/audit")).json["entries"]
        assert (entry["action"], entry["ids"]) == ("redeliver", [event_id, "nothing.1"])


async def test_a_queue_without_an_outbox_says_who_has_one(site: Site) -> None:
    web = await site.web()
    assert (await web.get("/api/outboxes")).json == {"queues": []}
    reply = await web.get("/api/queues/streams/outbox")
    assert (reply.status, "has no outbox" in reply.json["detail"]) == (404, True)


async def test_what_cannot_be_sent_again_says_why_and_changes_nothing(tmp_path: Path) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db?keep_ms=60000"
    event_id = await given_up(url)
    path = "/api/queues/inbox/outbox"
    refused: dict[bytes, tuple[int, str]] = {
        b'{"event_ids":["a"': (400, "JSON"),
        b"\xff": (400, "JSON"),
        b'["a"]': (422, "Expected `object`, got `array`"),
        b"{}": (422, "missing required field `event_ids`"),
        b'{"event_ids":"a"}': (422, "Expected `array`, got `str` - at `event_ids`"),
        b'{"event_ids":[]}': (422, "length >= 1"),
        b'{"event_ids":[5]}': (422, "Expected `str`, got `int` - at `event_ids[0]`"),
        b'{"event_ids":[""]}': (422, "length >= 1 - at `event_ids[0]`"),
        b'{"event_ids":["a"],"force":true}': (422, "unknown field `force`"),
    }
    async with serving(GatewaySettings(queues=(url,), port=0)) as running:
        web = Web(running.url)
        for body, (status, told) in refused.items():
            reply = await web.send(
                "POST", f"{path}/redeliver", body, {"content-type": "application/json"}
            )
            assert (reply.status, told in reply.json["detail"]) == (status, True), reply.body
        many = {"event_ids": [f"e{n}" for n in range(501)]}
        assert "length <= 500" in (await web.post(f"{path}/redeliver", many)).json["detail"]
        reply = await web.post("/api/queues/nope/outbox/redeliver", {"event_ids": [event_id]})
        assert (reply.status, "serves inbox" in reply.json["detail"]) == (404, True)
        (event,) = (await web.get(f"{path}?kind=failed")).json["events"]
        assert event["event_id"] == event_id, "all the while nothing was done"
        reply = await web.post(f"{path}/redeliver", {"event_ids": [event_id, event_id]})
        assert reply.json == {"answers": {event_id: "ok"}}
        reply = await web.post(f"{path}/redeliver", {"event_ids": [event_id]})
        assert reply.json == {"answers": {event_id: "queued"}}, "it is on its way already"
