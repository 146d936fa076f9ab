"""A gateway before several stores, one of which is absent: each contract fails alone."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tenure.core.endpoint import SCOPES
from tenure.gateway.auth import CACHE_S
from tenure.gateway.keyrings import JoinedKeyRings, open_keyring, open_keyrings
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.store.embedded import EmbeddedRedis
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import Web
from tests.ports import free_port
from tests.waiting import until

CLAIM = {"worker_id": "w1"}
JOB = {"task": "resize", "payload": {"n": 1}}


class Half:
    """`tenure gateway` with streams on a closed port first, and the plane on a file second."""

    def __init__(self, folder: Path) -> None:
        self.plane = f"plane+sqlite:///{folder}/plane.db"
        self.streams = f"streams+redis://127.0.0.1:{free_port()}/0"
        self.web = Web(f"http://127.0.0.1:{free_port()}")
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *more: str) -> Web:
        port = self.web.url.rpartition(":")[2]
        urls = ("--queue", self.streams, "--queue", self.plane)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tenure.cli", "gateway", "--port", port, *urls, *more),
            env=os.environ | {"TENURE_LOG_LEVEL": "error"},
        )
        await until(self._answers)
        return self.web

    async def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            await self._process.wait()

    async def _answers(self) -> bool:
        try:
            return (await self.web.get("/livez")).status == 200
        except OSError:
            return False


@pytest.fixture
async def half(tmp_path: Path) -> AsyncGenerator[Half]:
    made = Half(tmp_path)
    yield made
    await made.stop()


async def test_an_absent_redis_does_not_take_the_plane_beside_it_down(half: Half) -> None:
    ring = open_keyring(half.plane)
    _, text = await ring.create(SCOPES, "operator")
    await ring.close()
    web = await half.start()
    keyed = {"authorization": f"Bearer {text}"}
    made = await web.post("/v1/plane/jobs", JOB, **keyed)
    assert made.status in (200, 201, 202), made
    claimed = await web.post("/internal/worker/claim", CLAIM, **keyed)
    assert claimed.json["claimed"], claimed
    chat = await web.post("/v1/jobs", {"task": "chat", "payload": {}}, **keyed)
    is_problem(chat, 503, "store_away")
    ready = await web.get("/readyz")
    assert (ready.status, ready.json["status"]) == (200, "degraded")
    away = [name for name, said in ready.json["checks"].items() if said != "ok"]
    assert away == ["store:streams"]


async def test_pages_of_all_queues_show_what_the_stores_that_answer_have(half: Half) -> None:
    ring = open_keyring(half.plane)
    _, text = await ring.create(SCOPES, "operator")
    await ring.close()
    web = await half.start()
    keyed = {"authorization": f"Bearer {text}"}
    assert (await web.post("/v1/plane/jobs", JOB, **keyed)).status in (200, 201, 202)
    queues = (await web.get("/api/queues", **keyed)).json["queues"]
    assert {queue["contract"]: queue["away"] for queue in queues} == {
        "streams": True,
        "plane": False,
    }
    for path in ("/", "/jobs", "/workers", "/dead", "/api/workers"):
        assert (await web.get(path, **keyed)).status == 200, path
    found = (await web.get("/api/jobs", **keyed)).json
    assert ([job["queue"] for job in found["jobs"]], found["complete"]) == (["plane"], False)
    paused = await web.post(f"/api/queues/{queues[1]['name']}/pause", **keyed)
    assert (paused.status, paused.json["paused"]) == (200, True)


async def test_a_store_that_never_answered_does_not_count_as_one_without_keys(half: Half) -> None:
    """Keys of one store close the routes of all of them, so nothing is open but health."""
    web = await half.start()
    for path in ("/livez", "/readyz"):
        assert (await web.get(path)).status == 200, path
    is_problem(await web.post("/v1/plane/jobs", JOB), 503, "store_away")
    is_problem(await web.post("/internal/worker/claim", CLAIM), 503, "store_away")
    for path in ("/api/queues", "/api/jobs", "/api/workers"):
        is_problem(await web.get(path), 503, "store_away")
    is_problem(await web.post("/api/queues/plane/pause"), 503, "store_away")
    is_problem(await web.post("/v1/jobs", {"task": "chat", "payload": {}}), 503, "store_away")


async def test_a_gateway_whose_stores_have_all_answered_once_is_open_without_keys(
    tmp_path: Path,
) -> None:
    server = EmbeddedRedis(appendfsync="no")
    await asyncio.to_thread(server.start)
    streams, plane = f"streams+{server.url}", f"plane+sqlite:///{tmp_path}/plane.db"
    try:
        async with serving(GatewaySettings(queues=(streams, plane), port=0)) as running:
            web = Web(running.url)
            assert (await web.post("/v1/plane/jobs", JOB)).status in (200, 201, 202)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(CACHE_S + 0.1)  # what was asked before is believed that long
            assert (await web.post("/v1/plane/jobs", JOB)).status in (200, 201, 202)
    finally:
        await asyncio.to_thread(server.stop)


async def test_a_key_is_checked_in_the_store_that_keeps_it(half: Half) -> None:
    ring = open_keyring(half.plane)
    _, text = await ring.create(("jobs:write", "jobs:work", "jobs:read"), "plane")
    await ring.close()
    web = await half.start("--require-key")
    keyed = {"authorization": f"Bearer {text}"}
    made = await web.post("/v1/plane/jobs", JOB, **keyed)
    assert made.status in (200, 201, 202), made
    assert (await web.post("/internal/worker/claim", CLAIM, **keyed)).status == 200
    ticket = await web.post("/v1/tickets", **keyed)
    assert ticket.status == 201
    status = f"/v1/plane/jobs/{made.json['job_id']}?ticket={ticket.json['ticket']}"
    assert (await web.get(status)).status == 200
    assert (await web.post("/internal/worker/claim", CLAIM)).status == 401
    # A key that the store beside may keep is neither good nor bad while that store is away.
    unknown = {"authorization": f"Bearer tn_{'0' * 12}_{'0' * 64}"}
    is_problem(await web.post("/internal/worker/claim", CLAIM, **unknown), 503, "store_away")


async def test_keys_of_a_store_that_goes_away_do_not_leave_the_gateway_open(
    tmp_path: Path,
) -> None:
    server = EmbeddedRedis(appendfsync="no")
    await asyncio.to_thread(server.start)
    streams, plane = f"streams+{server.url}", f"plane+sqlite:///{tmp_path}/plane.db"
    try:
        ring = open_keyring(streams)
        _, text = await ring.create(("jobs:work",), "kept in Redis")
        await ring.close()
        async with serving(GatewaySettings(queues=(streams, plane), port=0)) as running:
            web = Web(running.url)
            keyed = {"authorization": f"Bearer {text}"}
            assert (await web.post("/internal/worker/claim", CLAIM, **keyed)).status == 200
            assert (await web.post("/internal/worker/claim", CLAIM)).status == 401
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(CACHE_S + 0.1)  # what was asked before is believed that long
            assert (await web.post("/internal/worker/claim", CLAIM)).status == 401
            away = await web.post("/internal/worker/claim", CLAIM, **keyed)
            is_problem(away, 503, "store_away")
            await asyncio.to_thread(server.start)

            async def back() -> bool:
                return (await web.post("/internal/worker/claim", CLAIM, **keyed)).status == 200

            await until(back)
    finally:
        await asyncio.to_thread(server.stop)


async def test_a_stream_of_a_revoked_key_ends_while_another_store_is_away(tmp_path: Path) -> None:
    server = EmbeddedRedis(appendfsync="no")
    await asyncio.to_thread(server.start)
    streams, plane = f"streams+{server.url}", f"plane+sqlite:///{tmp_path}/plane.db"
    kept, beside = open_keyring(plane), open_keyring(streams)
    try:
        key, text = await kept.create(("jobs:write", "jobs:read"), "kept in the file")
        _, other = await beside.create(("jobs:write", "jobs:read"), "kept in Redis")
        async with serving(GatewaySettings(queues=(streams, plane), port=0)) as running:
            web = Web(running.url)
            opened = []
            for bearer in (other, text):
                keyed = {"authorization": f"Bearer {bearer}"}
                made = await web.post("/v1/plane/jobs", JOB, **keyed)
                path = f"/v1/plane/jobs/{made.json['job_id']}/events"
                opened.append(await web.stream(path, **keyed))
            first, stream = opened
            await asyncio.to_thread(server.kill)
            await kept.revoke(key.id)
            await stream.all(timeout_s=10)
            first.close()
    finally:
        await kept.close()
        await beside.close()
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("streams+redis://127.0.0.1:1?db=1", "streams+redis://127.0.0.1:1?db=2"),
        ("plane+postgresql:///?host=a&dbname=x", "plane+postgresql:///?host=b&dbname=x"),
        ("plane+postgresql:///?host=a&dbname=x", "plane+postgresql:///?host=a&dbname=y"),
        ("plane+postgresql:///x?host=a&port=1", "plane+postgresql:///x?host=a&port=2"),
    ],
)
async def test_stores_that_differ_in_an_option_of_their_url_have_rings_of_their_own(
    one: str, two: str
) -> None:
    same, apart = open_keyrings([one, one]), open_keyrings([one, two])
    assert not isinstance(same, JoinedKeyRings)
    assert isinstance(apart, JoinedKeyRings)
    await same.close()
    await apart.close()
