"""A gateway that reaches one Redis as several users, not all of whom may read the API keys."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs

from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import Redis
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import Web
from tests.waiting import until

STREAMS = "streams+{}"
BULLMQ = "bullmq+{}?queue=mail"
WRONG = {"authorization": f"Bearer tn_{'1' * 12}_{'0' * 64}"}
ACL = ("on", ">pw", "&*", "+@all")


class Users:
    """One Redis with the users `all`, who may use every key, and `bull`, who may not read keys."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def make(self) -> None:
        redis = Redis(self._url)
        await redis.call("ACL", "SETUSER", "all", *ACL, "~*")
        await redis.call("ACL", "SETUSER", "bull", *ACL, "~bull:*")
        await redis.close()

    def url(self, queue: str, user: str) -> str:
        parts = urlsplit(self._url)
        return queue.format(f"redis://{user}:pw@{parts.hostname}:{parts.port}/0")


@pytest.fixture
async def users() -> AsyncGenerator[Users]:
    server = EmbeddedRedis(appendfsync="no")
    await asyncio.to_thread(server.start)
    made = Users(server.url)
    await made.make()
    yield made
    await asyncio.to_thread(server.stop)


def served(*queues: str, **settings: Any) -> Any:
    return serving(GatewaySettings(queues=queues, port=0, **settings))


@pytest.mark.parametrize("first", ["all", "bull"])
async def test_a_user_who_may_not_read_keys_hides_none_that_another_reads(
    users: Users, first: str
) -> None:
    both = [users.url(STREAMS, "all"), users.url(BULLMQ, "bull")]
    ring = open_keyring(both[0])
    _, text = await ring.create(("jobs:read", "jobs:write"), "a tenant")
    await ring.close()
    with capture_logs() as lines:
        async with served(*(both if first == "all" else reversed(both))) as running:
            web = Web(running.url)
            good = await web.get("/v1/jobs", authorization=f"Bearer {text}")
            assert good.status == 200
            assert (await web.get("/v1/jobs")).status == 401
            answers = [(await web.get("/v1/jobs", **WRONG)).status for _ in range(60)]
    assert set(Counter(answers)) == {401, 429}
    events = Counter(line["event"] for line in lines)
    assert events["login_failed"] > 0
    assert events["request_failed"] == 0


async def test_a_store_that_lets_nobody_read_keys_keeps_none_and_leaves_nothing_open(
    users: Users,
) -> None:
    """Another store answers, so that a wrong key is known to be wrong."""
    queues = users.url(BULLMQ, "bull"), "memory://beside"
    with capture_logs() as lines:
        async with served(*queues) as running:
            web = Web(running.url)
            await until(lambda: any(line["event"] == "keys_refused" for line in lines))
            assert (await web.get("/api/queues", **WRONG)).status == 401
            is_problem(await web.get("/api/queues"), 503, "store_refused")
            assert (await web.get("/livez")).status == 200
    (said,) = [line for line in lines if line["event"] == "keys_refused"]
    assert "~tenure:*" in said["note"]
    assert "pw" not in said["store"]


async def test_requests_that_fail_for_one_cause_do_not_fill_the_log(users: Users) -> None:
    with capture_logs() as lines:
        async with served(users.url(BULLMQ, "bull")) as running:
            web = Web(running.url)
            for number in range(40):
                wrong = {"authorization": f"Bearer tn_{number:012}_{'0' * 64}"}
                is_problem(await web.get("/api/queues", **wrong), 503, "store_refused")
                assert (await web.get("/jobs")).status == 503
    events = Counter(line["event"] for line in lines)
    assert (events["request_failed"], events["page_store_away"]) == (5, 1)
