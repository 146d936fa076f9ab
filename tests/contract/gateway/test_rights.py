"""Every route, asked with every scope, for one's own objects and for another tenant's.

The routes declare which right they ask for; what that means is written here a second time, in
`allowed`. A route that is mounted and not in `ASKED` fails the walk.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.routing import Route
from structlog.testing import capture_logs

from tenure.cli.config import Config
from tenure.cli.keys import open_seal
from tenure.core.endpoint import SCOPES, Right
from tenure.core.errors import UsageError
from tenure.core.job import JobRecord, NewJob
from tenure.core.registry import open_queue
from tenure.dashboard.app import assets
from tenure.dashboard.audit import AuditEntry
from tenure.dashboard.search import parse
from tenure.gateway.application import Gateway
from tenure.gateway.http.routes import rights_of
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.store.embedded import EmbeddedRedis
from tenure.vault import new_kek
from tests.contract.gateway.web import JSON, Web
from tests.contract.unwanted import given_up
from tests.waiting import until

FORM = {"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "same-origin"}
KEYS = {"source": {"access_key_id": "AKID", "secret_access_key": "secret"}}
TRANSCODE = {
    "source": {"url": "s3://media/in/clip.mov"},
    "outputs": [{"name": "720p.mp4", "format": "mp4"}],
    "destination": {"url": "s3://media/out"},
}
# What one scope gives of the others.
GIVES: dict[str, set[str]] = {scope: {scope} for scope in SCOPES} | {
    "observe": {"observe", "jobs:read", "metrics"},
    "admin": set(SCOPES),
}
STREAM_KEY = ("jobs:write", "jobs:read", "jobs:cancel", "jobs:work", "stream:b")
HOLDERS: list[tuple[str, ...]] = [
    *((scope,) for scope in SCOPES),
    *(("observe", scope) for scope in ("jobs:write", "jobs:cancel", "jobs:work")),
    STREAM_KEY,
    ("admin", "stream:b"),
]


@dataclass(frozen=True)
class Ask:
    """How a route is asked. `path`, `body` and `form` get the id of an object of `contract`.

    `foreign` is false where a request cannot name another tenant's object. `action` is the word of
    the audit log where it is not the declared one, `whole` where the object has no owner.
    """

    path: Callable[[str], str] | None = None
    body: Callable[[str], Any] | None = None
    form: Callable[[str], list[tuple[str, str]]] | None = None
    contract: str = ""
    foreign: bool = True
    action: str = ""
    whole: bool = False


def job(contract: str, **more: Any) -> Ask:
    return Ask(contract=contract, **more)


def form(**fields: str) -> Callable[[str], list[tuple[str, str]]]:
    return lambda it: [(name, value.replace("ID", it)) for name, value in fields.items()]


def listed(name: str = "job_ids") -> Callable[[str], Any]:
    return lambda it: {name: [it]}


def worker(**more: Any) -> Ask:
    body = json.dumps({"worker_id": "w1"} | more)
    return Ask(body=lambda it: json.loads(body.replace('"ID', f'"{it}')), contract="plane")


HELD = {"job_id": "ID", "attempt_id": "ID:1", "lease_token": "forged", "stream": "b"}
READ = Ask()
JOB = "/api/queues/streams/jobs/{}"
ASKED: dict[str, Ask] = {
    "POST /v1/jobs": Ask(body=lambda it: {"task": "chat", "payload": {}}, foreign=False),
    "GET /v1/jobs": Ask(foreign=False),
    "GET /v1/jobs/{job_id}": job("streams", path="/v1/jobs/{}".format),
    "GET /v1/jobs/{job_id}/events": job("streams", path="/v1/jobs/{}/events".format),
    "POST /v1/jobs/{job_id}/cancel": job("streams", path="/v1/jobs/{}/cancel".format),
    "POST /v1/plane/jobs": Ask(
        body=lambda it: {"jobs": [{"payload": {}, "stream": "b", "requester": it}]}
    ),
    "GET /v1/plane/jobs/{job_id}": job("plane", path="/v1/plane/jobs/{}".format),
    "GET /v1/plane/jobs/{job_id}/events": job("plane", path="/v1/plane/jobs/{}/events".format),
    "GET /v1/plane/jobs/{job_id}/history": job("plane", path="/v1/plane/jobs/{}/history".format),
    "GET /v1/plane/news": Ask(foreign=False),
    "POST /v1/plane/jobs/{job_id}/cancel": job("plane", path="/v1/plane/jobs/{}/cancel".format),
    "POST /internal/worker/claim": worker(streams=["b"]),
    "POST /internal/worker/heartbeat": worker(leases=[HELD]),
    "POST /internal/worker/complete": worker(jobs=[HELD | {"result": 1}]),
    "POST /internal/worker/fail": worker(jobs=[HELD | {"error": {"code": "c", "message": "m"}}]),
    "POST /internal/worker/report": worker(reports=[HELD | {"step": "s"}]),
    "POST /internal/worker/children": worker(**HELD),
    "POST /internal/worker/upkeep": worker(),
    "GET /v1/plane/schedules": READ,
    "PUT /v1/plane/schedules/{name}": Ask(
        lambda it: "/v1/plane/schedules/nightly",
        lambda it: {"task": "t", "payload": {}, "every_ms": 3_600_000, "stream": "b"},
        foreign=False,
    ),
    "DELETE /v1/plane/schedules/{name}": Ask(
        lambda it: "/v1/plane/schedules/nightly", foreign=False
    ),
    "POST /transcode": Ask(body=lambda it: TRANSCODE, foreign=False),
    "GET /transcode/status": job("inbox", path="/transcode/status?job_id={}".format),
    "PUT /transcode/credentials": job(
        "inbox",
        body=lambda it: {"job_id": it, "credentials": KEYS, "credential_version": 0},
    ),
    "POST /transcode/webhook-secret": Ask(foreign=False),
    "POST /v1/tickets": Ask(foreign=False),
    "GET /api/queues": READ,
    "POST /api/queues/{queue}/pause": Ask(lambda it: "/api/queues/streams/pause", whole=True),
    "POST /api/queues/{queue}/resume": Ask(lambda it: "/api/queues/streams/resume", whole=True),
    "GET /api/audit/export": READ,
    "GET /livez": READ,
    "GET /readyz": READ,
    "GET /metrics": READ,
    "GET /api/jobs": READ,
    "GET /api/jobs/count": READ,
    "GET /api/queues/{queue}/jobs/{job_id}": job("streams", path=JOB.format),
    "GET /api/queues/{queue}/jobs/{job_id}/events": job("streams", path=f"{JOB}/events".format),
    "GET /api/schedules": READ,
    "GET /api/workers": READ,
    "GET /api/dead": READ,
    "GET /api/stats": READ,
    "GET /api/autoscale/{queue}": Ask(lambda it: "/api/autoscale/streams"),
    "GET /api/audit": READ,
    "GET /api/bulk/{bulk_id}": job("bulk", path="/api/bulk/{}".format),
    "POST /api/queues/{queue}/jobs": Ask(
        lambda it: "/api/queues/streams/jobs", lambda it: {"task": "t"}, foreign=False
    ),
    "POST /api/queues/{queue}/retry": job(
        "streams", path=lambda it: "/api/queues/streams/retry", body=listed()
    ),
    "POST /api/queues/{queue}/cancel": job(
        "streams", path=lambda it: "/api/queues/streams/cancel", body=listed()
    ),
    "POST /api/queues/{queue}/remove": job(
        "streams", path=lambda it: "/api/queues/streams/remove", body=listed()
    ),
    "POST /api/bulk": job(
        "streams", body=lambda it: {"action": "cancel", "q": f"id:{it}"}, action="cancel all"
    ),
    "POST /api/bulk/{bulk_id}/stop": job(
        "bulk", path="/api/bulk/{}/stop".format, action="stop cancel all", whole=True
    ),
    "GET /api/outboxes": READ,
    "GET /api/queues/{queue}/outbox": Ask(lambda it: "/api/queues/inbox/outbox"),
    "POST /api/queues/{queue}/outbox/redeliver": job(
        "outbox",
        path=lambda it: "/api/queues/inbox/outbox/redeliver",
        body=listed("event_ids"),
    ),
    "GET /": READ,
    "GET /jobs": READ,
    "GET /jobs/confirm": Ask(lambda it: "/jobs/confirm?verb=retry&q=x"),
    "GET /jobs/{queue}/{job_id:path}": job("streams", path="/jobs/streams/{}".format),
    "GET /queues": READ,
    "GET /workers": READ,
    "GET /dead": READ,
    "GET /outbox": READ,
    "GET /history": READ,
    "GET /audit": READ,
    "GET /bulk/{bulk_id}": job("bulk", path="/bulk/{}".format),
    "GET /live": READ,
    "GET /login": READ,
    "POST /login": Ask(form=form(key="KEY")),
    "POST /logout": Ask(form=form()),
    "GET /static/{digest}/{name}": Ask(lambda it: next(iter(assets().values())).path),
    "POST /ui/act": job("streams", form=form(verb="cancel", job="streams|ID"), action="cancel"),
    "POST /ui/bulk": job("streams", form=form(verb="cancel", q="id:ID"), action="cancel all"),
    "POST /ui/bulk/stop": job("bulk", form=form(bulk="ID"), action="stop cancel all", whole=True),
    "POST /ui/queue": Ask(form=form(verb="resume", queue="streams"), action="resume", whole=True),
    "POST /ui/redeliver": job("outbox", form=form(queue="inbox", job="ID")),
    "POST /ui/submit": Ask(form=form(queue="streams", task="t", payload="{}"), foreign=False),
    "POST /ui/replay": job(
        "streams",
        form=form(queue="streams", job_id="ID", task="t", payload="{}"),
        action="replay ID",
    ),
    "GET /docs": READ,
    "GET /openapi.json": READ,
    "GET /asyncapi.json": READ,
}


class Town:
    """A gateway before queues of every contract, and tenants with keys for it."""

    def __init__(self, gateway: Gateway, web: Web, queues: dict[str, Any], ring: Any) -> None:
        self.gateway = gateway
        self.rights = gateway.rights
        self.actor = gateway.dashboard.actions
        self.event_id = self.bulk_id = ""
        self._web = web
        self._queues = queues
        self._ring = ring

    async def key(self, *scopes: str) -> tuple[str, Web]:
        """The id of a new key, and a client that shows it."""
        key, text = await self._ring.create(scopes, "test")
        return key.id, Web(self._web.url, {"x-api-key": text})

    async def made(self, contract: str, owner: str) -> str:
        """The id of an object of this owner; the owner itself where none is needed."""
        if contract in ("", "outbox", "bulk"):
            return {"": owner, "outbox": self.event_id, "bulk": self.bulk_id}[contract]
        options = {"stream": "b"} if contract == "plane" else {}
        return await self.submit(
            contract, NewJob(task="t", payload=b"{}", requester=owner, options=options)
        )

    async def submit(self, contract: str, *jobs: NewJob) -> str:
        """The id of the last one."""
        return str((await self._queues[contract].submit(jobs))[-1].job_id)

    async def read(self, contract: str, job_id: str) -> JobRecord:
        [served] = [each for each in self.gateway.queues if each.contract == contract]
        found = await served.ledger.get(job_id)
        assert found is not None, job_id
        return found

    async def begin(self, task: str, count: int) -> str:
        """The id of an action on so many jobs."""
        if count:
            await self.submit("streams", *[NewJob(task=task, payload=b"{}")] * count)
        search = parse(f"task:{task}", now_ms=time.time_ns() // 1_000_000)
        return (await self.actor.begin("", "cancel", search)).id

    async def ask(self, route: str, web: Web, it: str) -> int:
        """The status of the answer to one request."""
        method, _, path = route.partition(" ")
        ask = ASKED[route]
        target = ask.path(it) if ask.path else path
        if ask.form is not None:
            fields = urlencode(ask.form(it)).replace("KEY", web.headers["x-api-key"])
            return (await web.send(method, target, fields.encode(), FORM)).status
        if ask.body is not None:
            return (await web.send(method, target, json.dumps(ask.body(it)).encode(), JSON)).status
        return await head_of(web, method, target)

    async def audit(self, who: str) -> list[AuditEntry]:
        """What one key did, newest first."""
        return [entry for entry in await self.actor.audit.list(limit=100) if entry.who == who]

    async def has_noted(self, who: str, action: str, whose: tuple[str, ...]) -> bool:
        """Whether that was the last thing this key did."""
        (entry, *_) = await self.audit(who) or [None]
        return entry is not None and (entry.action, entry.whose) == (action, whose)


async def head_of(web: Web, method: str, target: str) -> int:
    """The status alone: an event stream has no end to wait for."""
    reader, writer = await web.connect()
    try:
        writer.write(web.head(method, target, None, FORM if method == "POST" else None))
        line = await reader.readline()
    finally:
        writer.close()
    return int(line.split(b" ")[1])


def allowed(scopes: tuple[str, ...], right: Right, *, own: bool) -> bool:
    """What the declarations mean."""
    if not right.scope:
        return True
    given = set().union(*(GIVES.get(scope, set()) for scope in scopes))
    kept_to_streams = any(scope.startswith("stream:") for scope in scopes)
    if right.scope not in given or (kept_to_streams and not right.streams):
        return False
    if right.whose != "own" or own or "admin" in scopes:
        return True
    return not right.does and "observe" in scopes


@pytest.fixture
async def town(redis_server: EmbeddedRedis, tmp_path: Path) -> AsyncGenerator[Town]:
    unique = secrets.token_hex(4)
    redis = f"{redis_server.url}?queue=q{unique}"
    urls = {
        "streams": f"streams+{redis_server.url}?namespace=t{unique}:",
        "bullmq": f"bullmq+{redis}",
        "omniq": f"omniq+{redis}",
        "inbox": f"inbox+sqlite:///{tmp_path}/jobs.db?synchronous=normal",
        "plane": f"plane+sqlite:///{tmp_path}/plane.db?synchronous=normal&streams=a,b",
    }
    lent = {"seal": open_seal(Config({"TENURE_VAULT_KEYS": new_kek("town")}, tmp_path))}
    settings = GatewaySettings(
        queues=tuple(urls.values()), port=0, route_options=lent, streams_per_key=100
    )
    async with AsyncExitStack() as stack:
        queues = {name: open_queue(url) for name, url in urls.items()}
        ring = open_keyring(urls["streams"])
        for each in (*queues.values(), ring):
            stack.push_async_callback(each.close)
        running = await stack.enter_async_context(serving(settings))
        made = Town(running.gateway, Web(running.url), queues, ring)
        made.event_id = await given_up(urls["inbox"])
        made.bulk_id = await made.begin("nothing", 0)
        yield made


def test_a_route_without_a_declared_right_keeps_the_gateway_from_starting() -> None:
    async def page(request: Any) -> None: ...

    with pytest.raises(UsageError, match="declares no right"):
        rights_of([Route("/new", page)])


async def test_every_mounted_route_is_walked_and_what_writes_says_so(town: Town) -> None:
    assert set(ASKED) == set(town.rights), "a route was added or removed: declare how it is asked"
    for route, right in town.rights.items():
        if not route.startswith("GET "):
            assert right.does, f"{route} writes: its right names what it does"


@pytest.mark.timeout(300)
@pytest.mark.clause("S-51")
@pytest.mark.parametrize("scopes", HOLDERS, ids="+".join)
async def test_a_key_may_do_to_whose_objects_what_the_routes_declare(
    town: Town, scopes: tuple[str, ...]
) -> None:
    me, web = await town.key(*scopes)
    other, _ = await town.key("jobs:write")
    wrong = []
    for route, right in town.rights.items():
        for owner in (me, other) if ASKED[route].foreign else (me,):
            it = await town.made(ASKED[route].contract, owner)
            status = await town.ask(route, web, it)
            may = allowed(scopes, right, own=owner == me)
            if status not in (range(200, 400) if may else (403, 404)):
                wrong.append((route, "own" if owner == me else "other", status, right))
    assert not wrong


@pytest.mark.timeout(300)
async def test_every_change_over_http_is_written_to_the_audit_log(town: Town) -> None:
    me, web = await town.key("admin")
    other, _ = await town.key("jobs:write")
    for route, right in town.rights.items():
        ask = ASKED[route]
        if not right.does or route.startswith("GET "):
            continue
        it = await town.made(ask.contract, other)
        if ask.contract == "bulk":
            it = await town.begin(secrets.token_hex(4), 3_000)
        before = len(await town.audit(me))
        assert await town.ask(route, web, it) < 400, route
        plain = right.audit == "others" and not ask.foreign  # the job itself keeps its submitter
        if plain or right.audit in ("history", "never"):
            assert len(await town.audit(me)) == before, route
            continue
        whose = () if ask.whole else (other,) if ask.foreign else (me,)
        if ask.contract == "outbox":
            whose = ("local",)
        action = (ask.action or right.does).replace("JOB", it).replace("ID", it)
        await until(partial(town.has_noted, me, action, whose))
        assert len(await town.audit(me)) > before, route


async def test_a_tenant_adds_little_to_the_audit_log_by_acts_on_its_own_objects(
    town: Town,
) -> None:
    """The log keeps the newest entries: else a tenant has those of administrators pruned."""
    me, web = await town.key("jobs:write", "jobs:cancel")
    _, admin = await town.key("admin")
    for contract, path in (("streams", "/v1/jobs"), ("plane", "/v1/plane/jobs")):
        job_id = await town.made(contract, me)
        assert (await web.post(f"{path}/{job_id}/cancel")).status < 300
    assert await town.audit(me) == [], "the history of the job has it"
    share = town.gateway.settings.audit_keep // 100
    with capture_logs() as said:
        for _ in range(share + 20):
            assert (await web.post("/transcode/webhook-secret")).status == 201
    beyond = [line for line in said if line["event"] == "action_beyond_share"]
    assert [line["who"] for line in beyond] == [me], "one line: the log is not to be filled either"
    noted = [entry for entry in await town.actor.audit.list(limit=1_000) if entry.who == me]
    assert len(noted) == share
    await admin.post("/api/queues/streams/pause")
    assert (await town.actor.audit.list(limit=1))[0].action == "pause", "others are not limited"


async def test_every_route_that_reads_many_objects_has_the_places_of_searches(town: Town) -> None:
    """By the document: each GET whose answer has a list, and those that count jobs."""
    # The settings; attempts and events of one job; a page of the journal, read once for all.
    one, plans = "/v1/plane/jobs/{job_id}", "/v1/plane/schedules"
    few = ("/api/outboxes", one, f"{one}/history", "/v1/plane/news", plans)
    counting = ["/metrics", "/api/autoscale/{queue}", "/api/jobs/count", "/api/audit/export"]
    document = json.loads(town.gateway.openapi)

    def has_list(reply: Any) -> bool:
        media = reply.get("content", {}).get("application/json", {}).get("schema", {})
        shape = document["components"]["schemas"].get(media.get("$ref", "").rpartition("/")[2], {})
        return any(each.get("type") == "array" for each in shape.get("properties", {}).values())

    lists = [
        path
        for path, methods in document["paths"].items()
        if path not in few and has_list(methods.get("get", {}).get("responses", {}).get("200", {}))
    ]
    assert {"/v1/jobs", "/api/jobs", "/api/queues", "/api/audit"} <= set(lists)
    me, web = await town.key("admin")
    with ExitStack() as places:
        for _ in range(8):
            places.enter_context(town.gateway.dashboard.searches.slot(me))
        for path in [*lists, *counting]:
            asked = path.replace("{queue}", "streams").replace("{job_id}", "x")
            reply = await web.get(asked)
            assert (reply.status, reply.headers.get("retry-after")) == (429, "1"), path
    assert (await web.get("/v1/jobs")).status == 200


async def test_a_job_keeps_who_submitted_it_and_which_workers_held_it(town: Town) -> None:
    me, web = await town.key("jobs:write", "jobs:read", "jobs:work")
    made = await web.post("/v1/plane/jobs", {"payload": {}, "stream": "b"})
    await web.post("/internal/worker/claim", {"worker_id": "w-7", "streams": ["b"]})
    assert (await town.read("plane", made.json["job_id"])).requester == me
    attempts = (await web.get(f"/v1/plane/jobs/{made.json['job_id']}")).json["attempts"]
    assert [attempt["worker_id"] for attempt in attempts] == ["w-7"]


@pytest.mark.clause("I-41")
async def test_an_observer_cannot_replace_the_storage_credentials_of_another_tenant(
    town: Town,
) -> None:
    victim, theirs = await town.key("jobs:write")
    _, web = await town.key("observe", "jobs:write")
    job_id = await town.made("inbox", victim)
    body = {"job_id": job_id, "credentials": KEYS, "credential_version": 0}
    sent = json.dumps(body).encode()
    assert (await web.get(f"/transcode/status?job_id={job_id}")).status == 200, "it may look"
    assert (await web.send("PUT", "/transcode/credentials", sent, JSON)).status == 404
    assert (await theirs.send("PUT", "/transcode/credentials", sent, JSON)).status == 200


async def test_an_observer_cannot_submit_in_the_name_of_another_tenant(town: Town) -> None:
    victim, _ = await town.key("jobs:write")
    _, web = await town.key("observe", "jobs:write")
    body = {"jobs": [{"payload": {}, "stream": "b", "job_id": "forged", "requester": victim}]}
    assert (await web.post("/v1/plane/jobs", body)).status == 403
    assert (await web.get("/v1/plane/jobs/forged")).status == 404


@pytest.mark.parametrize(
    ("contract", "path"),
    [("streams", "/v1/jobs/{}/cancel"), ("plane", "/v1/plane/jobs/{}/cancel")],
)
async def test_an_observer_cannot_cancel_the_job_of_another_tenant(
    town: Town, contract: str, path: str
) -> None:
    victim, _ = await town.key("jobs:write")
    _, web = await town.key("observe", "jobs:cancel")
    job_id = await town.made(contract, victim)
    before = await town.read(contract, job_id)
    assert (await web.post(path.format(job_id))).status == 404
    assert await town.read(contract, job_id) == before


@pytest.mark.clause("P-20")
async def test_a_key_for_one_stream_that_names_none_writes_into_no_other(town: Town) -> None:
    _, web = await town.key("jobs:write", "jobs:read", "stream:b")
    for body in ({"payload": {}}, {"jobs": [{"payload": {}}]}):
        reply = await web.post("/v1/plane/jobs", body)
        assert (reply.status, "not for 'a'" in reply.json["detail"]) == (403, True), reply.body
    assert (await web.post("/v1/plane/jobs", {"payload": {}, "stream": "b"})).status == 202
    # Nor into queues that have no streams, nor through the routes of admins.
    assert (await web.post("/v1/jobs", {"task": "chat", "payload": {}})).status == 403
    _, admin = await town.key("admin", "stream:b")
    assert (await admin.post("/api/queues/plane/jobs", {"task": "t"})).status == 403
    job_id = await town.submit("plane", NewJob(task="t", payload=b"{}", options={"stream": "a"}))
    assert (await admin.get(f"/v1/plane/jobs/{job_id}")).status == 404
    assert (await admin.post(f"/v1/plane/jobs/{job_id}/cancel")).status == 404


async def test_a_tenant_cannot_take_the_ids_of_schedules_and_chains(town: Town) -> None:
    """Under such an id its job would be taken for that of the schedule, or of the chain."""
    _, web = await town.key("jobs:write", "jobs:read", "jobs:work")
    for job_id in ("nightly@1795024210000", "import-17@0.7", "x@99999.0"):
        reply = await web.post("/v1/plane/jobs", {"payload": 1, "job_id": job_id})
        assert (reply.status, "chains" in reply.json["detail"]) == (422, True), reply.body
        await web.post("/v1/plane/jobs", {"jobs": [{"payload": 1, "job_id": job_id}]})
        assert (await web.get(f"/v1/plane/jobs/{job_id}")).status == 404
    for job_id in ("me@example", "a@b.1", "17@1.0.1", "a:b@1"):
        assert (await web.post("/v1/plane/jobs", {"payload": 1, "job_id": job_id})).status == 202


@pytest.mark.clause("P-20")
async def test_a_worker_for_one_stream_does_not_learn_of_jobs_in_others(town: Town) -> None:
    _, web = await town.key("jobs:work", "stream:b")
    job_id = await town.submit("plane", NewJob(task="t", payload=b"{}", options={"stream": "a"}))
    answers = [
        (await web.post("/internal/worker/heartbeat", held)).json
        for each in (job_id, "unknown")
        for held in (
            {"worker_id": "w1", "job_id": each, "lease_token": "x"},
            {"worker_id": "w1", "leases": [{"job_id": each, "lease_token": "x"}]},
        )
    ]
    assert answers[:2] == answers[2:]


@pytest.mark.parametrize("contract", ["streams", "bullmq", "omniq", "inbox", "plane"])
async def test_a_forged_cursor_is_refused_by_every_contract(town: Town, contract: str) -> None:
    _, web = await town.key("observe")
    [served] = [each for each in town.gateway.queues if each.contract == contract]
    await town.submit(contract, NewJob(task="t", payload=b"{}"))
    nines = "9" * 4_500
    for begun in ("{}", "x:1", ":", f"{nines}:1", nines, f"{nines}_1", "\u0663:1", "\u0663", "-"):
        raw = json.dumps({served.name: [begun]}, ensure_ascii=False).encode()
        after = base64.urlsafe_b64encode(raw).decode().rstrip("=")
        for path in ("/api/jobs", "/jobs"):
            reply = await web.get(f"{path}?after={after}")
            assert reply.status in (400, 409, 422), (path, begun[:20], reply.status, reply.body)


async def test_a_ticket_reads_once_and_neither_acts_nor_makes_tickets(town: Town) -> None:
    _, web = await town.key("admin")
    bare = Web(web.url)

    async def ticket() -> str:
        return str((await web.post("/v1/tickets")).json["ticket"])

    assert (await bare.post(f"/v1/tickets?ticket={await ticket()}")).status == 403
    assert (await bare.post(f"/api/queues/streams/pause?ticket={await ticket()}")).status == 403
    sent = urlencode({"verb": "pause", "queue": "streams"}).encode()
    assert (await bare.send("POST", f"/ui/queue?ticket={await ticket()}", sent, FORM)).status == 403
    assert (await bare.get(f"/api/queues?ticket={await ticket()}")).status == 200


async def test_cursors_and_conflicts_tell_no_ids_of_other_tenants(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.store.redis_queue._SCAN_MAX", 10)
    other, _ = await town.key("jobs:write")
    me, web = await town.key("jobs:write", "jobs:read")
    mine, theirs = set(), set()
    for number in range(40):
        owner, ids = (me, mine) if number % 10 == 0 else (other, theirs)
        ids.add(await town.made("streams", owner))
    found, after, pages = set(), "", 0
    while pages == 0 or after:
        page = (await web.get(f"/v1/jobs?limit=1&after={after}")).json
        found |= {job["job_id"] for job in page["jobs"]}
        after, pages = page["after"], pages + 1
        assert not any(job_id in after for job_id in theirs), after
    assert found == mine
    taken = await town.made("plane", other)
    body = {"payload": {}, "stream": "b", "job_id": taken}
    reply = await web.post("/v1/plane/jobs", body)
    assert (reply.status, taken in reply.json["detail"], other in str(reply.json)) == (
        409,
        False,
        False,
    )


async def test_the_id_of_a_removed_job_gives_no_access_to_its_history(town: Town) -> None:
    """Submitters choose ids: another tenant may choose one that was used before."""
    _, theirs = await town.key("jobs:write", "jobs:read", "jobs:work")
    _, web = await town.key("jobs:write", "jobs:read")
    _, admin = await town.key("admin")
    body = {"payload": {}, "stream": "b", "job_id": "order-17"}
    await theirs.post("/v1/plane/jobs", body)
    claim = await theirs.post("/internal/worker/claim", {"worker_id": "w1", "streams": ["b"]})
    held = {name: claim.json[name] for name in ("job_id", "attempt_id", "lease_token")}
    held |= {"stream": "b"}
    news = {"worker_id": "w1", "reports": [held | {"step": "theirs", "data": {"iban": "DE1"}}]}
    await theirs.post("/internal/worker/report", news)
    await theirs.post("/internal/worker/complete", held | {"worker_id": "w1", "result": 1})
    gone = await admin.post("/api/queues/plane/remove", {"job_ids": ["order-17"]})
    assert gone.json["answers"] == {"order-17": "ok"}
    assert (await web.post("/v1/plane/jobs", body)).status == 202
    await admin.post("/v1/plane/jobs/order-17/cancel")
    events = await (await web.stream("/v1/plane/jobs/order-17/events")).all()
    assert events[-1].name == "DLQ", "the whole stream was read"
    assert not [event for event in events if "theirs" in event.data or "iban" in event.data]


async def test_the_volume_of_all_tenants_is_not_told_to_one_of_them(town: Town) -> None:
    _, tenant = await town.key("jobs:write", "jobs:read", "jobs:cancel", "jobs:work")
    _, scraper = await town.key("metrics")
    for path in ("/metrics", "/api/queues", "/api/autoscale/streams", "/api/stats", "/queues"):
        assert (await tenant.get(path)).status == 403, path
    assert (await scraper.get("/metrics")).status == 200
    assert (await scraper.get("/api/autoscale/streams")).status == 200
    assert (await scraper.get("/api/jobs")).status == 403
