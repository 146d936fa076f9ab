"""A gateway whose queues, keys and audit log lie on a cluster, before and after a failover."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from tenure.core.endpoint import SCOPES
from tenure.core.registry import open_journal
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.store.redis.cluster import slot_of
from tenure.worker import Job, Settings, Worker, task
from tests.contract.gateway.web import Web
from tests.redis_topologies import RedisCluster
from tests.waiting import until

pytestmark = pytest.mark.few


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_job_goes_from_post_to_its_last_event_also_after_a_failover(
    cluster: RedisCluster, shards: int
) -> None:
    tag = secrets.token_hex(4)
    url = f"streams+{cluster.url}?namespace={{{tag}}}:&shards={shards}"

    @task("chat")
    async def chat(job: Job) -> None:
        pass

    worker = Worker([chat], queues=[url], settings=Settings(backoff_ms_max=200))
    served = asyncio.ensure_future(worker.serve())
    ring = open_keyring(url)
    _, text = await ring.create(SCOPES, "operator")
    settings = GatewaySettings(queues=(url,), port=0, drain_ms=500)
    async with serving(settings) as running:
        web = Web(running.url, {"authorization": f"Bearer {text}"})

        async def done() -> bool:
            posted = await web.post("/v1/jobs", {"task": "chat", "payload": {"n": 1}})
            if posted.status == 503:
                return False
            assert posted.status == 202, posted
            following = await web.follow(posted.json["job_id"])
            return (await following.all())[-1].name == "done"

        async def is_ready() -> bool:
            return (await web.get("/readyz")).status == 200

        assert await done()
        assert (await web.get("/v1/jobs/none")).status == 404
        assert (await Web(running.url).get("/v1/jobs/none")).status == 401
        await asyncio.to_thread(cluster.fail_over, slot_of(f"{{{tag}}}"))
        await until(done, within_s=15)
        await until(is_ready, within_s=15)
    worker.stop()
    assert await served == 0
    journal = open_journal(url)
    assert len(await journal.read()) >= 6
    await journal.close()
    await ring.close()
