"""The gateway in an application of the user's own: mounted or included, and behind a root path."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel

from tenure.dashboard.app import assets
from tenure.gateway import Caller, GatewaySettings, create_app, router
from tenure.gateway.keyrings import open_keyring
from tests.contract.cli.pages import page
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.embedded import served
from tests.contract.gateway.web import Web
from tests.ports import free_port
from tests.waiting import until

PREFIX = "/tools/queue"


def mounted(settings: GatewaySettings) -> FastAPI:
    app = FastAPI()
    app.mount(PREFIX, create_app(settings))
    return app


def included(settings: GatewaySettings) -> FastAPI:
    app = FastAPI()
    app.include_router(router(settings), prefix=PREFIX)
    return app


def included_with_a_dependency(settings: GatewaySettings) -> FastAPI:
    async def reads_the_body(request: Request) -> None:
        await request.body()

    app = FastAPI()
    app.include_router(router(settings), prefix=PREFIX, dependencies=[Depends(reads_the_body)])
    return app


WAYS = [mounted, included, included_with_a_dependency]


class Within(Web):
    """A client of a gateway under a prefix."""

    def head(self, method: str, path: str, *rest: Any) -> bytes:
        return super().head(method, PREFIX + path, *rest)


@pytest.fixture
def settings(site: Site) -> GatewaySettings:
    return GatewaySettings(queues=(site.url(),))


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
async def within(
    request: pytest.FixtureRequest, settings: GatewaySettings
) -> AsyncGenerator[Within]:
    async with served(request.param(settings)) as url:
        yield Within(url)


async def test_a_job_is_submitted_followed_to_its_end_and_found_at_its_location(
    site: Site, within: Within
) -> None:
    made = await within.post("/v1/jobs", {"task": "chat", "payload": {"n": 1}})
    assert made.status == 202
    job_id = made.json["job_id"]
    assert made.headers["location"] == f"{PREFIX}/v1/jobs/{job_id}"
    following = await within.follow(job_id)
    lease = await site.claim()
    await site.finish(lease)
    assert [event.name for event in await following.all()][-1] == "done"
    found = await Web(within.url).get(made.headers["location"])
    assert (found.status, found.json["status"]) == (200, "done")


async def test_problems_are_those_of_the_gateway_and_link_to_its_page(within: Within) -> None:
    for reply, status, code in (
        (await within.get("/v1/jobs/nothing"), 404, "not_found"),
        (await within.send("PUT", "/v1/jobs"), 405, "method"),
        (await within.post("/v1/jobs", {"task": "chat"}), 422, "invalid"),
        (await within.send("POST", "/v1/jobs", b"{", {"content-type": "application/json"}), 400,
         "bad_json"),
    ):  # fmt: skip
        assert reply.status == status
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.json["code"] == code
        assert reply.json["type"] == f"{PREFIX}/docs#{code}"
    assert f"id='{code}'" in (await within.get("/docs")).body.decode()


async def test_a_body_beyond_the_limit_is_refused(site: Site) -> None:
    settings = GatewaySettings(queues=(site.url(),), body_bytes_max=1_000)
    async with served(included(settings)) as url:
        reply = await Within(url).post("/v1/jobs", {"task": "chat", "payload": {"t": "x" * 2_000}})
        assert reply.status == 413


async def test_head_is_answered_like_get_without_a_body(within: Within) -> None:
    job_id = await within.submit()
    for path in ("/livez", f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/events", "/"):
        assert (await within.send("HEAD", path)).status == 200, path


async def test_its_own_document_is_whole_and_says_where_it_is(
    settings: GatewaySettings, within: Within
) -> None:
    document = (await within.get("/openapi.json")).json
    assert document["servers"] == [{"url": PREFIX}]
    alone = create_app(settings).openapi()
    assert document["paths"] == alone["paths"]
    assert document["components"] == alone["components"]
    assert (await within.get("/asyncapi.json")).status == 200


async def test_pages_styles_and_links_are_under_the_prefix(within: Within) -> None:
    shown = (await within.get("/jobs")).body.decode()
    for link in (f'href="{PREFIX}/queues"', f'action="{PREFIX}/jobs"', f'data-base="{PREFIX}"'):
        assert link in shown
    assert 'href="/' not in shown.replace(f'href="{PREFIX}/', "")
    for asset in assets().values():
        assert f'"{PREFIX}{asset.path}"' in shown
        assert (await within.get(asset.path)).status == 200
    assert (await within.get("/static/static/app.css")).status == 404


async def test_a_person_signs_in_under_the_prefix(site: Site, within: Within) -> None:
    ring = open_keyring(site.url())
    _, key = await ring.create(("admin",), "admin")
    await ring.close()

    async def is_asked_for_a_key() -> bool:  # the number of keys is cached for a second
        return (await within.get("/jobs")).status == 303

    await until(is_asked_for_a_key)
    sent = await within.get("/jobs?q=is:failed")
    assert sent.headers["location"].startswith(f"{PREFIX}/login?next=%2Ftools%2Fqueue%2Fjobs")
    form = {"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "same-origin"}
    signed = await within.send("POST", "/login", f"key={key}".encode(), form)
    assert (signed.status, signed.headers["location"]) == (303, f"{PREFIX}/")
    assert f"Path={PREFIX};" in signed.headers["set-cookie"]
    cookie = signed.headers["set-cookie"].partition(";")[0]
    assert (await within.get("/jobs", cookie=cookie)).status == 200


async def test_an_including_application_describes_the_operations_under_the_prefix(
    settings: GatewaySettings,
) -> None:
    document = included(settings).openapi()
    alone = create_app(settings).openapi()
    assert set(document["paths"]) == {PREFIX + path for path in alone["paths"]}
    assert document["components"] == alone["components"]
    submit = document["paths"][f"{PREFIX}/v1/jobs"]["post"]
    body = submit["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CreateJob"}


class JobView(BaseModel):
    mine: int


class ProblemDocument(BaseModel):
    mine: int


class CreateJob(BaseModel):
    mine: int


async def test_an_application_may_use_names_of_the_gateways_shapes(
    settings: GatewaySettings,
) -> None:
    app = included(settings)

    @app.post("/mine", responses={400: {"model": ProblemDocument}})
    async def mine(body: CreateJob) -> JobView:
        return JobView(mine=body.mine)

    document = app.openapi()
    text = json.dumps(document)
    for name in ("JobView", "ProblemDocument", "CreateJob"):
        assert len([each for each in document["components"]["schemas"] if name in each]) == 2
    for reference in set(_references(document)):
        assert reference.rpartition("/")[2] in document["components"]["schemas"], text[:200]


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [each for part in value.values() for each in _references(part)]
    if isinstance(value, list):
        return [each for part in value for each in _references(part)]
    return []


async def test_a_dependency_of_the_application_guards_every_route(
    settings: GatewaySettings,
) -> None:
    async def pass_word(x_pass: Annotated[str, Header()] = "") -> None:
        if x_pass != "open sesame":
            raise HTTPException(403, "the pass word")

    app = FastAPI()
    app.include_router(router(settings), prefix=PREFIX, dependencies=[Depends(pass_word)])
    guarded = create_app(settings, dependencies=[Depends(pass_word)])
    app.mount("/mounted", guarded)
    async with served(app) as url:
        web = Web(url)
        for base in (PREFIX, "/mounted"):
            for method, path in (
                ("GET", "/livez"),
                ("GET", "/jobs"),
                ("GET", "/openapi.json"),
                ("POST", "/v1/jobs"),
                ("POST", "/ui/act"),
                ("GET", next(iter(assets().values())).path),
            ):
                assert (await web.send(method, base + path)).status == 403, path
            known = {"x-pass": "open sesame"}
            assert (await web.send("GET", f"{base}/livez", headers=known)).status == 200
            body = json.dumps({"task": "chat", "payload": {}}).encode()
            known["content-type"] = "application/json"
            assert (await web.send("POST", f"{base}/v1/jobs", body, known)).status == 202


async def test_middleware_of_the_application_sees_every_route(settings: GatewaySettings) -> None:
    app = create_app(settings)
    app.add_middleware(CORSMiddleware, allow_origins=["https://shop.example"], allow_methods=["*"])
    async with served(app) as url:
        asked = {"origin": "https://shop.example", "access-control-request-method": "POST"}
        reply = await Web(url).send("OPTIONS", "/v1/jobs", headers=asked)
        assert reply.headers["access-control-allow-origin"] == "https://shop.example"


async def test_routes_that_are_added_are_served_described_and_fail_with_problems(
    settings: GatewaySettings,
) -> None:
    app = create_app(settings)

    @app.get("/mine/{number}")
    async def mine(number: int) -> dict[str, int]:
        if number == 7:
            raise HTTPException(418, "seven")
        return {"number": number}

    async with served(app) as url:
        web = Web(url)
        assert (await web.get("/mine/3")).json == {"number": 3}
        assert "/mine/{number}" in (await web.get("/openapi.json")).json["paths"]
        wrong = await web.get("/mine/x")
        assert (wrong.status, wrong.json["code"]) == (422, "invalid")
        assert "path.number" in wrong.json["detail"]
        teapot = await web.get("/mine/7")
        assert (teapot.status, teapot.json["detail"]) == (418, "seven")
        assert teapot.headers["content-type"] == "application/problem+json"


async def requester_of(site: Site, job_id: str) -> str:
    record = await site.ledger.get(job_id)
    assert record is not None
    return record.requester


def by_header(request: Request) -> Caller | None:
    user = request.headers.get("x-user")
    return Caller(user, frozenset({"jobs:write", "jobs:read"})) if user else None


async def by_header_later(request: Request) -> Caller | None:
    return by_header(request)


@pytest.mark.parametrize("hook", [by_header, by_header_later])
async def test_a_hook_names_the_caller_and_nobody_is_anonymous_beside_it(
    site: Site, settings: GatewaySettings, hook: Callable[..., Any]
) -> None:
    app = FastAPI()
    app.include_router(router(settings, caller=hook), prefix=PREFIX)
    async with served(app) as url:
        ada, bo = Within(url, {"x-user": "ada"}), Within(url, {"x-user": "bo"})
        job_id = await ada.submit()
        assert await requester_of(site, job_id) == "ada"
        assert (await ada.get(f"/v1/jobs/{job_id}")).status == 200
        assert (await bo.get(f"/v1/jobs/{job_id}")).status == 404
        assert (await bo.get("/api/queues")).status == 403
        assert (await Within(url).get(f"/v1/jobs/{job_id}")).status == 401
        following = await ada.follow(job_id)
        await site.finish(await site.claim())
        assert [event.name for event in await following.all()][-1] == "done"
        elsewhere = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
        foreign = await ada.send("POST", f"/v1/jobs/{job_id}/cancel", headers=elsewhere)
        assert foreign.json["code"] == "cross_site"


def by_password(request: Request) -> Caller | None:
    given = request.headers.get("authorization", "").partition(" ")[2]
    return Caller("ada", frozenset({"admin"})) if given == "YWRhOnB3" else None


@pytest.mark.parametrize("scheme", ["Basic", "basic", "Negotiate"])
async def test_a_password_that_browsers_send_by_themselves_admits_no_page_of_another_site(
    settings: GatewaySettings, scheme: str
) -> None:
    async with served(create_app(settings, caller=by_password)) as url:
        (queue,) = (
            await Web(url, {"authorization": f"{scheme} YWRhOnB3"}).get("/api/queues")
        ).json["queues"]
        pause = f"/api/queues/{queue['name']}/pause"
        for headers, status in (
            ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
            ({"origin": "https://evil.example"}, 403),
            ({"sec-fetch-site": "same-origin", "origin": url}, 200),
            ({}, 200),
        ):
            sent = {"authorization": f"{scheme} YWRhOnB3", "content-type": "text/plain", **headers}
            assert (await Web(url).send("POST", pause, headers=sent)).status == status, headers
        token = {"authorization": "Bearer YWRhOnB3", "origin": "https://shop.example"}
        assert (await Web(url).send("POST", pause, headers=token)).status == 200


async def test_keys_are_valid_beside_a_hook(site: Site, settings: GatewaySettings) -> None:
    ring = open_keyring(site.url())
    _, key = await ring.create(("jobs:write",), "program")
    await ring.close()
    async with served(create_app(settings, caller=by_header)) as url:
        assert await Web(url, {"authorization": f"Bearer {key}"}).submit()
        wrong = await Web(url, {"authorization": "Bearer tn_no"}).get("/v1/jobs")
        assert wrong.status == 401


@asynccontextmanager
async def behind(settings: GatewaySettings, *, stripped: bool) -> AsyncGenerator[Web]:
    """A proxy that serves the gateway under a prefix, which it strips or leaves."""
    app = create_app(settings)

    async def proxied(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["root_path"] = PREFIX
            if stripped:
                scope["path"] = scope["path"].removeprefix(PREFIX)
                scope["raw_path"] = scope["raw_path"].removeprefix(PREFIX.encode())
        await app(scope, receive, send)

    async with served(proxied) as url:
        yield Within(url)


@pytest.mark.parametrize("stripped", [True, False])
async def test_a_root_path_is_part_of_all_links(
    site: Site, settings: GatewaySettings, stripped: bool
) -> None:
    async with behind(settings, stripped=stripped) as web:
        made = await web.post("/v1/jobs", {"task": "chat", "payload": {}})
        assert made.headers["location"] == f"{PREFIX}/v1/jobs/{made.json['job_id']}"
        assert (await web.get("/openapi.json")).json["servers"] == [{"url": PREFIX}]
        shown = (await web.get("/jobs?q=is:failed")).body.decode()
        assert f'action="{PREFIX}/jobs"' in shown
        assert f'value="{PREFIX}/jobs?q=is%3Afailed"' in shown
        assert (await web.get("/none/such")).json["type"] == f"{PREFIX}/docs#not_found"


@pytest.mark.runs("docs/howto/fastapi.md:python")
async def test_the_application_of_the_page_serves_the_callers_it_names(site: Site) -> None:
    (block,) = [b.text for b in page("docs/howto/fastapi.md").blocks if b.language == "python"]
    scope: dict[str, Any] = {}
    exec(block.replace("streams+redis://127.0.0.1:6379/0", site.url()), scope)

    async def with_session(asked: Any, receive: Any, send: Any) -> None:
        asked["session"] = {"user": "ada"}
        await scope["app"](asked, receive, send)

    async with served(scope["app"]) as url:
        assert (await Web(url).get("/queue/v1/jobs")).status == 401
    exec(block.replace("streams+redis://127.0.0.1:6379/0", site.url()), scope)
    async with served(with_session) as url:
        reply = await Web(url).post("/queue/v1/jobs", {"task": "chat", "payload": {}})
        assert reply.status == 202
        assert await requester_of(site, reply.json["job_id"]) == "ada"


SERVERS = [block.text for block in page("docs/howto/fastapi.md").blocks if block.language == "bash"]


@pytest.mark.few
@pytest.mark.runs("docs/howto/fastapi.md:bash")
@pytest.mark.parametrize("command", SERVERS, ids=lambda command: command.split()[0])
async def test_any_asgi_server_serves_the_application_of_the_environment_in_many_processes(
    site: Site, command: str
) -> None:
    port = free_port()
    words = shlex.split(command.replace("8470", str(port)))
    environment = os.environ | {
        "TENURE_GATEWAY_QUEUES": site.url(),
        "TENURE_GATEWAY_RATE_PER_S": "0",
    }
    server = subprocess.Popen([sys.executable, "-m", *words], env=environment)
    try:
        web = Web(f"http://127.0.0.1:{port}")
        processes: set[str] = set()

        async def two_processes_answer() -> bool:
            try:
                replies = await asyncio.gather(*(web.get("/readyz") for _ in range(10)))
            except (OSError, EOFError):  # it does not listen yet
                return False
            ready = [reply for reply in replies if reply.status == 200]
            processes.update(reply.headers["x-request-id"].split("-")[0] for reply in ready)
            return len(processes) > 1

        await until(two_processes_answer, within_s=90)  # each process imports the gateway
        following = await web.follow(await web.submit())
        await site.finish(await site.claim())
        assert [event.name for event in await following.all()][-1] == "done"
    finally:
        server.terminate()
        await asyncio.to_thread(server.wait, 30)


async def test_a_setting_that_cannot_be_ends_a_server_with_the_reason_and_no_traceback(
    site: Site,
) -> None:
    words = ("-m", "uvicorn", "tenure.gateway:app", "--port", str(free_port()))
    environment = os.environ | {"TENURE_GATEWAY_QUEUES": site.url(), "TENURE_GATEWAY_TTL_S": "0"}
    server = await asyncio.create_subprocess_exec(
        sys.executable, *words, env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, said = await server.communicate()
    assert server.returncode != 0
    assert b"gateway.ttl_s (environment TENURE_GATEWAY_TTL_S) is at least 1 second, not 0" in said
    assert b"Traceback" not in said
