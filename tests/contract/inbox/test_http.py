"""POST /transcode and GET /transcode/status over a real gateway, on both engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tenure.cli.config import Config
from tenure.cli.keys import open_seal
from tenure.core.registry import open_queue
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.vault import new_kek
from tests.contract.gateway.web import JSON, Reply, Web
from tests.contract.inbox.conftest import Outbox, RawSql
from tests.contract.inbox_stage import InboxStage
from tests.contract.suite.acting import claim_one, settle

BODY: dict[str, Any] = {
    "source": {"url": "s3://media/in/clip.mov"},
    "outputs": [{"name": "720p.mp4", "format": "mp4"}],
    "destination": {"url": "s3://media/out"},
    "status_webhook_url": "https://requester.example/hook",
}
WRITE_AND_READ = ("jobs:write", "jobs:read")


class Site:
    """A gateway before an inbox, and two requesters with a key each."""

    def __init__(self, stage: InboxStage, url: str, keys: dict[str, str]) -> None:
        self.stage = stage
        self.url = url
        self.keys = keys

    def web(self, who: str = "anna") -> Web:
        headers = {"authorization": f"Bearer {self.keys[who]}"} if who else {}
        return Web(self.url, headers)

    async def post(self, body: Any = BODY, who: str = "anna", **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        raw = json.dumps(body).encode()
        return await self.web(who).send("POST", "/transcode", raw, {**JSON, **named})

    async def status(self, job_id: str, who: str = "anna") -> Reply:
        return await self.web(who).send("GET", f"/transcode/status?job_id={job_id}")


@pytest.fixture
async def site(inbox: InboxStage, tmp_path: Path) -> AsyncGenerator[Site]:
    ring = open_keyring(inbox.url)
    keys = {}
    for who in ("anna", "bert"):
        _, keys[who] = await ring.create(WRITE_AND_READ, who)
    _, keys["reader"] = await ring.create(("jobs:read",), "reader")
    # Every requester has a secret in the operator's file: what happens without is `test_door.py`.
    config = Config({"TENURE_VAULT_KEYS": new_kek("http")}, tmp_path)
    lent = {"has_secret": lambda requester: True, "seal": open_seal(config)}
    async with serving(GatewaySettings(queues=(inbox.url,), port=0, route_options=lent)) as running:
        yield Site(inbox, running.url, keys)
    for key in await ring.list():
        await ring.revoke(key.id)
    await ring.close()


@pytest.mark.clause("I-33")
async def test_a_transcode_is_accepted_and_only_stored(site: Site) -> None:
    reply = await site.post()
    assert reply.status == 202
    job_id = reply.json["job_id"]
    assert reply.headers["location"] == f"/transcode/status?job_id={job_id}"
    stored = await site.stage.ledger.get(job_id)
    assert stored is not None
    assert (stored.state, stored.task, stored.attempt) == ("queued", "transcode", 0)
    assert json.loads(stored.payload)["source"]["url"] == BODY["source"]["url"]


@pytest.mark.clause("I-33", "I-3")
async def test_the_same_key_and_request_answer_with_the_same_job(site: Site) -> None:
    first = await site.post(idempotency_key="order-1")
    again = await site.post(idempotency_key="order-1")
    assert (again.status, again.json) == (202, first.json)
    assert again.headers["idempotency-replayed"] == "true"
    other = await site.post({**BODY, "max_attempts": 9}, idempotency_key="order-1")
    assert (other.status, other.json["code"]) == (409, "conflict")
    foreign = await site.post(who="bert", idempotency_key="order-1")
    assert foreign.json["job_id"] != first.json["job_id"]


@pytest.mark.clause("I-33")
async def test_another_query_of_a_url_is_another_request(site: Site) -> None:
    def signed(signature: str) -> dict[str, Any]:
        url = f"https://bucket.example/in.mov?X-Amz-Signature={signature}"
        return {**BODY, "source": {"url": url}}

    first = await site.post(signed("one"), idempotency_key="signed")
    same = await site.post(signed("one"), idempotency_key="signed")
    assert (same.status, same.json) == (202, first.json)
    other = await site.post(signed("two"), idempotency_key="signed")
    assert (other.status, other.json["code"]) == (409, "conflict")


@pytest.mark.clause("I-3", "I-33")
async def test_a_repeated_request_gets_the_response_that_was_stored(
    site: Site, inbox: InboxStage, sql: RawSql
) -> None:
    first = await site.post(idempotency_key="kept")
    ((stored,),) = await sql(
        "SELECT response FROM idempotency_keys WHERE job_id = ?", first.json["job_id"]
    )
    assert json.loads(stored) == first.json == {"job_id": first.json["job_id"], "status": "queued"}
    lease = await claim_one(inbox.queue("w1"))
    await settle(inbox.queue("w1"), lease, "complete")
    assert (await site.post(idempotency_key="kept")).json == first.json


@pytest.mark.clause("I-3", "I-33")
async def test_a_storm_of_posts_of_one_key_is_one_job(site: Site) -> None:
    replies = await asyncio.gather(*(site.post(idempotency_key="storm") for _ in range(20)))
    assert {reply.status for reply in replies} == {202}
    assert len({reply.json["job_id"] for reply in replies}) == 1


@pytest.mark.clause("I-33", "I-34")
async def test_a_key_is_asked_for_and_its_scope_is_kept(site: Site) -> None:
    assert (await site.post(who="")).status == 401
    assert (await site.status("any", who="")).status == 401
    assert (await site.post(who="reader")).status == 403


@pytest.mark.clause("I-34")
async def test_the_status_of_a_job_is_read_in_every_state(site: Site) -> None:
    job_id = (await site.post()).json["job_id"]
    queue = site.stage.queue("w1")
    seen = [(await site.status(job_id)).json["status"]]
    lease = await claim_one(queue)
    seen.append((await site.status(job_id)).json["status"])
    await settle(queue, lease, "complete", result=b'{"files":["720p.mp4"]}')
    done = await site.status(job_id)
    assert [*seen, done.json["status"]] == ["queued", "claimed", "succeeded"]
    assert done.status == 200
    assert done.json["outputs"] == {"files": ["720p.mp4"]}
    assert done.json["attempt_count"] == 1
    assert "error" not in done.json


@pytest.mark.clause("I-34", "I-41")
async def test_a_job_of_another_requester_does_not_exist(site: Site) -> None:
    job_id = (await site.post()).json["job_id"]
    foreign = await site.status(job_id, who="bert")
    unknown = await site.status("0192f0c1-0000-7000-8000-000000000000", who="bert")
    assert foreign.status == unknown.status == 404
    assert foreign.json["detail"] == unknown.json["detail"]
    strange = await site.status("..%2f..%00", who="bert")
    assert strange.status in (404, 422)


@pytest.mark.clause("I-23", "I-34")
async def test_a_pruned_job_is_gone_for_its_requester_and_unknown_to_others(site: Site) -> None:
    job_id = (await site.post(idempotency_key="pruned")).json["job_id"]
    keeping = f"{site.stage.url}&keep_ms=1"
    queue = open_queue(keeping, worker_id="w1")
    outbox = Outbox(site.stage)
    try:
        await settle(queue, await claim_one(queue), "complete")
        await site.stage.advance(5)
        assert (await queue.upkeep()).trimmed == 0, "events of the job are still to be delivered"
        for _ in range(2):
            await settle(outbox.queue, await claim_one(outbox.queue), "complete")
        assert (await queue.upkeep()).trimmed == 1
    finally:
        await queue.close()
        await outbox.close()
    assert (await site.status(job_id)).status == 410
    assert (await site.status(job_id, who="bert")).status == 404


@pytest.mark.clause("I-33")
@pytest.mark.parametrize(
    "wrong",
    [
        {"outputs": []},
        {"status_webhook_url": "ftp://x.example/"},
        {"status_webhook_url": "https://user:pw@x.example/"},
        {"refresh_url": "https:///nowhere"},
        {"surprise": 1},
        {"max_attempts": 0},
        {"credentials": {"key": "AKIA"}},
        {"credentials": {"source": {"token": "line\nbreak"}}},
        {"credentials": {"source": {"token": "line end\n"}}},
    ],
    ids=lambda wrong: next(iter(wrong)) + str(wrong)[-12:-2],
)
async def test_a_request_that_cannot_be_served_is_refused_with_a_reason(
    site: Site, wrong: dict[str, Any]
) -> None:
    reply = await site.post({**BODY, **wrong})
    assert reply.status == 422
    assert reply.json["detail"]
    assert (await site.stage.ledger.counts()).states["queued"] == 0


@pytest.mark.clause("I-44")
async def test_keys_are_kept_as_hashes_in_the_queues_own_store(inbox: InboxStage) -> None:
    ring = open_keyring(inbox.url)
    key, text = await ring.create(("jobs:read",), "one", ttl_ms=60_000)
    found = await ring.find(key.id)
    assert found is not None
    assert (found.name, found.scopes, found.created_ms) == ("one", ("jobs:read",), key.created_ms)
    assert found.expires_ms == key.created_ms + 60_000
    assert text.rpartition("_")[2] not in repr(await ring.list())
    await ring.touch(key.id, 0)
    assert (await ring.list())[-1].last_used_ms > 0
    from tenure.core.endpoint import Caller

    ticket = await ring.issue(Caller(key.id, frozenset(("jobs:read",))))
    caller = await ring.redeem(ticket)
    assert caller is not None
    assert caller.requester == key.id
    assert await ring.redeem(ticket) is None
    assert await ring.revoke(key.id)
    assert not await ring.revoke(key.id)
    await ring.close()
