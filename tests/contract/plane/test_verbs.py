"""The four verbs as the contract words them, over real HTTP."""

import asyncio
import json

import pytest

from tests.contract.plane.conftest import Site, claim, enqueue, proof, verb

ERROR = {"code": "E1", "message": "it broke", "stack": "at line 1", "retryable": True}


@pytest.mark.clause("P-7", "P-8")
async def test_a_claim_answers_with_the_fields_of_the_contract(site: Site) -> None:
    web = await site.web(lease_ms=9_000)
    job_id = await enqueue(web, payload={"source": "a.mov", "n": [1, 2.5]}, task="render")
    lease = await claim(web, streams=["jobs"])
    assert lease["job_id"] == job_id
    assert lease["attempt_id"].startswith(job_id)
    assert lease["payload"] == {"source": "a.mov", "n": [1, 2.5]}
    assert (lease["stream"]["name"], bool(lease["stream"]["message_id"])) == ("jobs", True)
    assert (lease["lease_ttl_seconds"], lease["heartbeat_interval_seconds"]) == (9.0, 3.0)
    stored = (await web.get(f"/v1/plane/jobs/{job_id}")).json
    assert (stored["status"], stored["attempt"], stored["worker_id"]) == ("RUNNING", 1, "w1")
    assert stored["lease_until_ms"] == lease["lease_expires_at_ms"]
    assert 0 < lease["lease_remaining_ms"] <= 9_000
    assert await verb(web, "claim", streams=["jobs"]) == {"claimed": False}


@pytest.mark.clause("P-11")
async def test_a_heartbeat_needs_no_more_than_the_contract_names(site: Site) -> None:
    web = await site.web(lease_ms=600)
    await enqueue(web)
    lease = await claim(web)
    await asyncio.sleep(0.3)  # a heartbeat before two thirds are used writes nothing
    kept = await verb(web, "heartbeat", job_id=lease["job_id"], lease_token=lease["lease_token"])
    assert kept["ok"]
    assert kept["lease_expires_at"] > lease["lease_expires_at"]
    assert 300 < kept["lease_remaining_ms"] <= 600
    wrong = await verb(web, "heartbeat", job_id=lease["job_id"], lease_token="somebody-else")
    assert (wrong["ok"], wrong["lease_expires_at"]) == (False, None)
    unknown = await verb(web, "heartbeat", job_id="nobody", lease_token="x")
    assert not unknown["ok"]


@pytest.mark.clause("P-12", "P-21")
async def test_a_completed_job_keeps_its_result_and_its_attempt(site: Site) -> None:
    web = await site.web()
    job_id = await enqueue(web)
    lease = await claim(web)
    result = {
        "artifacts": [{"name": "out.mp4", "url": "s3://media/out.mp4", "sha256": "ab"}],
        "timings": {"fetch_ms": 12, "encode_ms": 3400},
        "outputs": {"frames": 240},
    }
    assert await verb(web, "complete", **proof(lease), result=result) == {
        "ok": True,
        "ack": True,
        "requeued": False,
        "dlq": False,
        "verdict": "completed",
        "due_ms": 0,
        "reason": "",
    }
    stored = (await web.get(f"/v1/plane/jobs/{job_id}")).json
    assert (stored["status"], stored["result"]) == ("SUCCEEDED", result)
    assert stored["lease_until_ms"] == 0
    (attempt,) = stored["attempts"]
    assert (attempt["attempt_id"], attempt["verdict"]) == (lease["attempt_id"], "complete")
    assert attempt["ended_ms"] >= attempt["claimed_ms"] > 0


@pytest.mark.clause("P-12")
async def test_the_stream_may_be_named_with_its_message_id_beside_it(site: Site) -> None:
    web = await site.web()
    await enqueue(web)
    lease = await claim(web)
    flat = proof(lease) | {"stream": "jobs", "message_id": lease["stream"]["message_id"]}
    assert (await verb(web, "complete", **flat, result=1))["ok"]


@pytest.mark.clause("P-13")
async def test_a_failed_job_is_requeued_while_attempts_are_left_and_then_a_dead_letter(
    site: Site,
) -> None:
    web = await site.web(retry_delay_ms=1)
    job_id = await enqueue(web, max_attempts=2)
    first = await claim(web)
    told = await verb(web, "fail", **proof(first), error=ERROR)
    assert (told["ok"], told["ack"], told["requeued"], told["dlq"]) == (True, True, True, False)
    second = await claim(web)
    assert (second["job_id"], second["attempt"]) == (job_id, 2)
    told = await verb(web, "fail", **proof(second), error=ERROR | {"message": "again"})
    assert (told["ok"], told["ack"], told["requeued"], told["dlq"]) == (True, True, False, True)
    stored = (await web.get(f"/v1/plane/jobs/{job_id}")).json
    assert (stored["status"], stored["error"]["message"]) == ("DLQ", "again")
    assert [each["verdict"] for each in stored["attempts"]] == ["retry", "bury"]
    assert stored["attempts"][0]["error"]["stack"] == "at line 1"


@pytest.mark.clause("P-13")
async def test_the_end_of_a_long_stack_is_kept(site: Site) -> None:
    web = await site.web()
    job_id = await enqueue(web)
    long = ERROR | {"stack": "s" * 100_000 + "the end"}
    await verb(web, "fail", **proof(await claim(web)), kind="release", error=long)
    (attempt,) = (await web.get(f"/v1/plane/jobs/{job_id}")).json["attempts"]
    assert attempt["error"]["stack"] == "s" * (8_000 - len("the end")) + "the end"


@pytest.mark.clause("P-13")
async def test_a_failure_that_is_not_retryable_goes_to_the_dead_letters(site: Site) -> None:
    web = await site.web()
    await enqueue(web, max_attempts=5)
    told = await verb(web, "fail", **proof(await claim(web)), error=ERROR | {"retryable": False})
    assert (told["requeued"], told["dlq"]) == (False, True)


@pytest.mark.clause("P-15")
async def test_what_is_sent_again_is_answered_the_same_and_another_result_is_refused(
    site: Site,
) -> None:
    web = await site.web(retry_delay_ms=50_000)
    job_id, _ = await enqueue(web), await enqueue(web)
    done, failed = await claim(web), await claim(web)
    first = await verb(web, "complete", **proof(done), result={"n": 1})
    assert await verb(web, "complete", **proof(done), result={"n": 1}) == first
    other = await verb(web, "complete", **proof(done), result={"n": 2})
    assert (other["ok"], other["ack"]) == (False, True)
    late = await verb(web, "fail", **proof(done), error=ERROR)
    assert (late["ok"], late["ack"], late["requeued"], late["dlq"]) == (False, True, False, False)
    stored = (await web.get(f"/v1/plane/jobs/{job_id}")).json
    assert (stored["status"], stored["result"]) == ("SUCCEEDED", {"n": 1})
    first = await verb(web, "fail", **proof(failed), error=ERROR)
    assert await verb(web, "fail", **proof(failed), error=ERROR) == first
    assert first["requeued"]


@pytest.mark.clause("P-16", "P-17")
async def test_a_late_call_is_refused_and_its_message_is_worth_nothing(site: Site) -> None:
    web = await site.web(lease_ms=80)
    job_id = await enqueue(web)
    late = await claim(web)
    await asyncio.sleep(0.12)  # the lease runs out by time alone
    current = await claim(web, worker_id="w2")
    assert (current["job_id"], current["attempt"]) == (job_id, 2)
    told = await verb(web, "complete", **proof(late), result="late")
    assert (told["ok"], told["ack"]) == (False, True)
    told = await verb(web, "fail", **proof(late), error=ERROR)
    assert (told["ok"], told["ack"], told["requeued"]) == (False, True, False)
    assert not (await verb(web, "heartbeat", **{k: late[k] for k in ("job_id", "lease_token")}))[
        "ok"
    ]
    assert (await verb(web, "complete", **proof(current), result="now"))["ok"]
    assert (await web.get(f"/v1/plane/jobs/{job_id}")).json["result"] == "now"


@pytest.mark.clause("P-16", "P-6")
async def test_a_wrong_token_changes_nothing_while_the_attempt_runs(site: Site) -> None:
    web = await site.web(streams="mail,video")
    await enqueue(web, stream="mail")
    lease = await claim(web)
    forged = proof(lease) | {"lease_token": "0" * 48}
    told = await verb(web, "complete", **forged, result=1)
    assert (told["ok"], told["ack"]) == (False, False)
    elsewhere = proof(lease) | {"stream": "video"}
    assert not (await verb(web, "complete", **elsewhere, result=1))["ok"]
    assert (await verb(web, "complete", **proof(lease), result=1))["ok"]


@pytest.mark.clause("P-6")
async def test_a_claim_sent_again_to_another_plane_answers_with_the_same_lease(site: Site) -> None:
    here, there = await site.web(), await site.web()
    await enqueue(here)
    await enqueue(here)
    first = await claim(here, claim_id="c-1")
    again = await claim(there, claim_id="c-1")
    assert (again["job_id"], again["lease_token"]) == (first["job_id"], first["lease_token"])
    assert again["attempt"] == 1
    other = await claim(there, claim_id="c-2")
    assert other["job_id"] != first["job_id"]
    assert (await verb(there, "complete", **proof(again), result=1))["ok"]


@pytest.mark.clause("P-18")
async def test_each_call_of_a_job_may_go_to_another_plane(site: Site) -> None:
    planes = [await site.web() for _ in range(3)]
    job_id = await enqueue(planes[0])
    lease = await claim(planes[1])
    held = {name: lease[name] for name in ("job_id", "lease_token")}
    assert (await verb(planes[2], "heartbeat", **held))["ok"]
    assert (await verb(planes[0], "complete", **proof(lease), result=1))["ok"]
    assert (await planes[1].get(f"/v1/plane/jobs/{job_id}")).json["status"] == "SUCCEEDED"


@pytest.mark.clause("P-19")
async def test_batches_are_answered_per_item(site: Site) -> None:
    web = await site.web()
    reply = await web.post("/v1/plane/jobs", {"jobs": [{"payload": n} for n in range(5)]})
    assert [each["status"] for each in reply.json["results"]] == ["created"] * 5
    answer = await verb(web, "claim", max_jobs=10, max_wait_ms=1_000)
    leases = answer["jobs"]
    assert sorted(lease["payload"] for lease in leases) == [0, 1, 2, 3, 4]
    held = [proof(lease) for lease in leases]
    held[1] = held[1] | {"lease_token": "wrong"}
    kept = (await verb(web, "heartbeat", leases=held))["results"]
    assert [each["ok"] for each in kept] == [True, False, True, True, True]
    done = await verb(web, "complete", jobs=[each | {"result": 7} for each in held[:3]])
    assert [each["ok"] for each in done["results"]] == [True, False, True]
    failed = await verb(web, "fail", jobs=[each | {"error": ERROR} for each in held[3:]])
    assert [each["requeued"] for each in failed["results"]] == [True, True]


@pytest.mark.clause("P-1", "P-2")
async def test_a_job_is_stored_once_for_its_id_and_for_its_key(site: Site) -> None:
    web = await site.web(streams="jobs:high,jobs:low")
    first = await web.post("/v1/plane/jobs", {"payload": 1}, Idempotency_Key="order-17")
    again = await web.post("/v1/plane/jobs", {"payload": 1}, Idempotency_Key="order-17")
    assert (first.status, again.status) == (202, 202)
    assert again.json["job_id"] == first.json["job_id"]
    assert again.headers["idempotency-replayed"] == "true"
    other = await web.post("/v1/plane/jobs", {"payload": 2}, Idempotency_Key="order-17")
    assert other.status == 409
    named = {"payload": 3, "job_id": "mine", "stream": "jobs:low", "priority": -5}
    for _ in range(2):
        reply = await web.post("/v1/plane/jobs", named)
        assert (reply.status, reply.json["job_id"]) == (202, "mine")
    assert (reply.json["stream"], reply.json["priority"]) == ("jobs:low", -5)
    assert (await web.post("/v1/plane/jobs", named | {"payload": 4})).status == 409
    unknown = await web.post("/v1/plane/jobs", {"payload": 1, "stream": "nowhere"})
    assert unknown.status == 422
    assert "jobs:high" in unknown.json["detail"]


@pytest.mark.clause("P-2")
async def test_a_delayed_job_waits_and_a_cancelled_one_never_runs(site: Site) -> None:
    web = await site.web()
    later = await enqueue(web, delay_ms=150)
    never = await enqueue(web, delay_ms=60_000)
    reply = await web.post(f"/v1/plane/jobs/{never}/cancel")
    assert (reply.status, reply.json["status"]) == (200, "DLQ")
    assert await verb(web, "claim", max_wait_ms=0) == {"claimed": False}
    assert (await claim(web))["job_id"] == later
    asked = await web.post(f"/v1/plane/jobs/{later}/cancel")
    assert (asked.status, asked.json["cancel_requested"]) == (202, True)


@pytest.mark.clause("P-17")
async def test_planes_that_reap_at_the_same_time_take_each_lease_back_once(site: Site) -> None:
    web = await site.web(lease_ms=60)
    others = [await site.web(lease_ms=60) for _ in range(2)]
    jobs = [{"payload": n} for n in range(30)]
    await web.post("/v1/plane/jobs", {"jobs": jobs})
    await verb(web, "claim", max_jobs=30)
    await asyncio.sleep(0.08)  # the leases run out by time alone
    rounds = await asyncio.gather(*(verb(each, "upkeep") for each in (web, *others)))
    assert sum(each["reclaimed"] for each in rounds) == 30
    again = await verb(web, "claim", max_jobs=50)
    assert {lease["attempt"] for lease in again["jobs"]} == {2}
    assert len(again["jobs"]) == 30


@pytest.mark.clause("P-17")
async def test_a_plane_reaps_by_itself(site: Site) -> None:
    web = await site.web(lease_ms=60, upkeep_ms=50, lost_max=1)
    job_id = await enqueue(web)
    await claim(web)
    async with asyncio.timeout(10):
        while (await web.get(f"/v1/plane/jobs/{job_id}")).json["status"] != "DLQ":
            await asyncio.sleep(0.02)  # a poll, bounded by the deadline
    stored = (await web.get(f"/v1/plane/jobs/{job_id}")).json
    assert stored["error"]["code"] == "lease_lost"
    assert json.dumps(stored["attempts"]).count('"lost"') == 1


@pytest.mark.clause("P-11")
async def test_every_heartbeat_extends_the_lease_and_answers_its_new_end(site: Site) -> None:
    web = await site.web(lease_ms=60_000)
    await enqueue(web)
    lease = await claim(web)
    ends = [lease["lease_expires_at_ms"]]
    for batch in (False, True, False):
        await asyncio.sleep(0.005)  # the database's clock goes on by a millisecond or more
        if batch:
            held = {name: lease[name] for name in ("job_id", "lease_token")}
            (kept,) = (await verb(web, "heartbeat", leases=[held]))["results"]
        else:
            kept = await verb(
                web, "heartbeat", job_id=lease["job_id"], lease_token=lease["lease_token"]
            )
        assert kept["ok"]
        assert kept["lease_expires_at"] > lease["lease_expires_at"]
        ends.append(kept["lease_expires_at_ms"])
        stored = (await web.get(f"/v1/plane/jobs/{lease['job_id']}")).json
        assert stored["lease_until_ms"] == ends[-1]
    assert ends == sorted(set(ends))


@pytest.mark.clause("P-8", "P-21")
async def test_an_attempt_has_its_row_from_the_claim_on(site: Site) -> None:
    web = await site.web(retry_delay_ms=1)
    job_id = await enqueue(web)
    assert (await web.get(f"/v1/plane/jobs/{job_id}")).json["attempts"] == []
    lease = await claim(web)
    (running,) = (await web.get(f"/v1/plane/jobs/{job_id}")).json["attempts"]
    assert running["attempt_id"] == lease["attempt_id"]
    assert (running["verdict"], running["ended_ms"], running["worker_id"]) == ("running", 0, "w1")
    assert running["claimed_ms"] > 0
    failed = await verb(web, "fail", **proof(lease), error={"code": "e", "message": "no"})
    assert failed["requeued"]
    again = await claim(web)
    first, second = (await web.get(f"/v1/plane/jobs/{job_id}")).json["attempts"]
    assert (first["attempt_id"], first["verdict"]) == (lease["attempt_id"], "retry")
    assert first["ended_ms"] >= first["claimed_ms"] == running["claimed_ms"]
    assert first["error"]["message"] == "no"
    assert (second["attempt_id"], second["verdict"]) == (again["attempt_id"], "running")
    await verb(web, "complete", **proof(again), result=1)
    *_, ended = (await web.get(f"/v1/plane/jobs/{job_id}")).json["attempts"]
    assert (ended["verdict"], ended["ended_ms"] > 0) == ("complete", True)


@pytest.mark.clause("P-26")
async def test_a_job_of_the_plane_is_followed_to_its_end_and_resumed(site: Site) -> None:
    web = await site.web()
    job_id = await enqueue(web)
    path = f"/v1/plane/jobs/{job_id}/events"
    following = await web.stream(path)
    heard = asyncio.create_task(following.all())
    lease = await claim(web)
    await verb(web, "complete", **proof(lease), result=1)
    events = await heard
    assert [event.name for event in events] == ["hello", "QUEUED", "RUNNING", "SUCCEEDED"]
    _, queued, running, ended = events
    assert ended.json["data"] == {"attempt": 1}
    rest = await (await web.stream(path, last_event_id=queued.id)).all()
    assert [event.id for event in rest[1:]] == [running.id, ended.id]
    assert (await web.get(path, last_event_id=ended.id)).status == 204
    assert (await web.get(path, last_event_id="1-0")).status == 400
    assert (await web.get("/v1/plane/jobs/none/events")).status == 404


@pytest.mark.clause("P-26")
async def test_a_stream_ends_with_its_job_and_shows_no_later_job_of_the_same_id(
    site: Site,
) -> None:
    web = await site.web()
    scopes = ("jobs:write", "jobs:read")
    first, second = [
        {"authorization": f"Bearer {(await site.ring.create(scopes, name))[1]}"}
        for name in ("first", "second")
    ]
    worker = {"authorization": f"Bearer {(await site.ring.create(('jobs:work',), 'w'))[1]}"}
    path, job = "/v1/plane/jobs", {"job_id": "swap", "payload": 1}
    assert (await web.post(path, job | {"delay_ms": 600_000}, **first)).status == 202
    heard = aiter(await web.stream(f"{path}/swap/events", **first))
    assert [(await anext(heard)).name for _ in range(2)] == ["hello", "QUEUED"]
    assert await site.ledger().remove(["swap"]) == ["ok"]
    assert (await web.post(path, job, **second)).status == 202
    asked = {"worker_id": "w1", "streams": [], "max_wait_ms": 5_000}
    lease = (await web.post("/internal/worker/claim", asked, **worker)).json
    end = {"worker_id": "w1", "result": 1, **proof(lease)}
    assert (await web.post("/internal/worker/complete", end, **worker)).status == 200
    async with asyncio.timeout(10):
        rest = [event.name async for event in heard]
    assert rest == ["expired", ":"]
