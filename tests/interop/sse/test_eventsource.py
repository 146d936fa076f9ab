"""npm's EventSource, the client that behaves as browsers do, follows jobs of the gateway."""

from __future__ import annotations

import asyncio

import pytest

from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.web import Web
from tests.interop.sse.conftest import Start


@pytest.mark.clause("S-46", "S-47")
async def test_eventsource_sees_the_whole_job_and_is_then_told_to_stay_away(
    site: Site, node_follower: Start
) -> None:
    web = await site.web(retry_ms=50)
    job_id = await web.submit()
    follower = await node_follower(f"{web.url}/v1/jobs/{job_id}/events")
    first = await follower.until("queued")
    assert [line["type"] for line in first] == ["open", "hello", "queued"]
    lease = await site.claim()
    await site.tell(lease, "half", b'{"text":"a\\nb \xe2\x80\xa8 c"}')
    await site.finish(lease)
    rest = await follower.until("closed")
    assert [line["type"] for line in rest] == [
        "running",
        "progress",
        "done",
        "reconnecting",
        "closed",
    ]
    assert rest[1]["data"]["data"] == {"text": "a\nb \u2028 c"}
    assert rest[-1]["code"] == 204
    assert await follower.process.wait() == 0


@pytest.mark.clause("S-48")
async def test_eventsource_goes_on_at_the_next_gateway_without_gap_or_repeat(
    site: Site, node_follower: Start
) -> None:
    settings = GatewaySettings(queues=(site.url(),), port=0, retry_ms=200, drain_ms=2_000)
    async with serving(settings) as running:
        web = Web(running.url)
        job_id = await web.submit()
        follower = await node_follower(f"{web.url}/v1/jobs/{job_id}/events")
        seen = await follower.until("queued")
        lease = await site.claim()
        await site.tell(lease, "one")
        seen += await follower.until("progress")
    await site.tell(lease, "while nobody serves")
    port = int(web.url.rpartition(":")[2])
    async with serving(GatewaySettings(queues=(site.url(),), port=port, retry_ms=200)):
        await site.tell(lease, "two")
        await site.finish(lease)
        seen += await follower.until("closed")
    ids = [line["id"] for line in seen if line.get("id") and line["type"] != "hello"]
    assert ids == [event.event_id for event in await site.ledger.events(job_id)]
    assert sum(line["type"] == "hello" for line in seen) >= 2


@pytest.mark.clause("S-51")
async def test_eventsource_brings_its_key_by_header_or_a_ticket_by_url(
    site: Site, node_follower: Start
) -> None:
    web = await site.web(retry_ms=50)
    ring = open_keyring(site.url())
    _, key = await ring.create(("jobs:read", "jobs:write", "jobs:cancel"), "browser")
    await ring.close()
    mine = Web(web.url, {"x-api-key": key})
    job_id = await mine.submit()
    await mine.post(f"/v1/jobs/{job_id}/cancel")
    url = f"{web.url}/v1/jobs/{job_id}/events"
    by_key = await node_follower(url, key)
    assert (await by_key.until("closed"))[-1]["code"] == 204
    ticket = (await mine.post("/v1/tickets")).json["ticket"]
    by_ticket = await node_follower(f"{url}?ticket={ticket}")
    seen = await by_ticket.until("closed")
    assert "canceled" in [line["type"] for line in seen]
    assert seen[-1]["code"] == 401, "a ticket is good for one connection"
    stranger = await node_follower(url)
    assert (await asyncio.wait_for(stranger.until("closed"), 10))[-1]["code"] == 401
