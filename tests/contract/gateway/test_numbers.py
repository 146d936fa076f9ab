"""Numbers that no field holds, and JSON that is too deep: a 400 on every route, and never a 500."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.store.embedded import EmbeddedRedis
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import Web

HUGE = "1" + "0" * 400
NUMBERS = ["1e400", "-1e400", HUGE, f"-{HUGE}", str(2**64), str(-(2**63) - 1), "1e25"]
DEEP = ["[" * 30_000 + "]" * 30_000, '{"a":' * 200 + "1" + "}" * 200]


class House:
    """A gateway before a queue of every contract."""

    def __init__(self, web: Web, document: dict[str, Any], names: list[str]) -> None:
        self.web = web
        self._document = document
        self._names = names

    def operations(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Method, path and description of every operation, once for every queue it is for."""
        found = []
        for path, methods in self._document["paths"].items():
            for name in self._names if "{queue}" in path else [""]:
                filled = re.sub(r"\{\w+\}", "x", path.replace("{queue}", name))
                found += [(method.upper(), filled, said) for method, said in methods.items()]
        return found

    def fields(self, schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The members of a body, by name."""
        while "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        found = dict(schema.get("properties", {}))
        for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
            found |= self.fields(part)
        return found


@pytest.fixture
async def house(redis_server: EmbeddedRedis, site: Site, tmp_path: Path) -> AsyncGenerator[House]:
    name = site.ns.strip(":")
    queues = (
        site.url(),
        f"plane+sqlite:///{tmp_path}/plane.db?synchronous=normal",
        f"inbox+sqlite:///{tmp_path}/inbox.db?synchronous=normal",
        f"bullmq+{redis_server.url}?queue={name}",
        f"omniq+{redis_server.url}?queue={name}",
    )
    async with serving(GatewaySettings(queues=queues, port=0)) as gateway:
        web = Web(gateway.url)
        names = [queue["name"] for queue in (await web.get("/api/queues")).json["queues"]]
        yield House(web, (await web.get("/openapi.json")).json, names)


@pytest.mark.timeout(300)
async def test_no_body_of_any_route_gets_a_number_or_depth_past_the_door(house: House) -> None:
    asked = 0
    for method, path, said in house.operations():
        content = said.get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            continue
        usual = content.get("example") or {}
        for field, kind in house.fields(content["schema"]).items():
            for text in (*NUMBERS, *DEEP):
                raw = json.dumps({**usual, field: "@"}).replace('"@"', text).encode()
                reply = await house.web.send(
                    method, path, raw, {"content-type": "application/json"}
                )
                asked += 1
                kept = field == "payload" and text in NUMBERS and 0 < abs(float(text)) < 1e300
                assert kept or reply.status == 400, (method, path, field, text[:30], reply)
                assert reply.status < 500, (kind, reply)
                if not kept:
                    assert reply.json["code"] in ("bad_number", "bad_json", "too_deep")
    assert asked > 300


@pytest.mark.timeout(300)
async def test_no_number_of_any_query_gets_past_the_door(house: House) -> None:
    asked = 0
    for method, path, said in house.operations():
        streams = "text/event-stream" in json.dumps(said.get("responses", {}))
        for asks in said.get("parameters", []):
            if asks["in"] != "query" or (streams and asks["name"] != "last_event_id"):
                continue
            number = asks["schema"].get("type") == "integer"
            for text in (*NUMBERS, "9" * 19 + "-" + "9" * 19, "9" * 25, "-1"):
                reply = await house.web.send(method, f"{path}?{asks['name']}={text}")
                asked += 1
                assert reply.status < 500, (path, asks["name"], text[:30], reply)
                if number and text in NUMBERS:
                    is_problem(reply, 400, "bad_number")
    assert asked > 200


@pytest.mark.parametrize("after", ["9" * 30, "1e400", "x", "-1", "1-2-3", HUGE])
async def test_a_position_that_is_none_is_a_bad_request(house: House, after: str) -> None:
    for _, path, said in house.operations():
        if said["operationId"] == "readQueueJobEvents":
            is_problem(await house.web.get(f"{path}?after={after}"), 400, "bad_cursor")


async def test_a_cursor_that_was_made_up_is_no_error_of_ours(house: House) -> None:
    for begun in ("9" * 30, "-1", "x:y", "1e400"):
        places = {name: [begun, "", 2**70, False, []] for name in house._names}
        raw = base64.urlsafe_b64encode(msgspec.json.encode(places)).decode().rstrip("=")
        assert (await house.web.get(f"/api/jobs?after={raw}")).status in (200, 400, 422)


@pytest.mark.parametrize(
    "search",
    [f"since:{'9' * 400}h", "since:1e400h", f"attempt:>{'9' * 400}", "payload.n>5",
     "payload.n<1e400", "before:0001-01-01T00:00%2B23:59", f"payload.{'9' * 400}:1"],
)  # fmt: skip
async def test_no_number_of_a_search_is_an_error_of_ours(
    house: House, site: Site, search: str
) -> None:
    payload = b'{"n":%b}' % HUGE.encode()
    await site.worker.submit([NewJob(task="t", payload=payload)])
    for path in ("/api/jobs", "/api/jobs/count", "/jobs"):
        reply = await house.web.get(f"{path}?q={search}")
        assert reply.status in (200, 422), (path, reply)


async def test_a_count_is_bounded_by_what_it_looks_at(site: Site, web: Web) -> None:
    """A search that matches next to nothing looked at every job there was."""
    queue = open_queue(site.url())
    for _ in range(30):
        await queue.submit([NewJob(task="t", payload=b"{}")] * 1_000)
    await queue.close()
    began = time.monotonic()
    reply = (await web.get("/api/jobs/count?q=payload.never:there")).json
    took_s = time.monotonic() - began
    assert reply == {"jobs": 0, "exact": False}
    assert (await web.get("/api/jobs/count?q=never:there+task:t+id:none*")).status == 200
    few = (await web.get("/api/jobs/count?q=state:running")).json
    assert few["jobs"] == 0
    assert took_s < 30, "it looked at 20,000 jobs and not at all of them"
