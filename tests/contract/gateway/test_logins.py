"""Wrong keys are logged and limited; people whom a trusted proxy names need no key."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs

from tenure.core.errors import UsageError
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.limits import Quota
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import Reply, Web

FORM = {"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "same-origin"}
LIMIT = 5
WRONG = "tn_000000000000_" + "0" * 64


@dataclass
class From(Web):
    """A client at an address of its own."""

    address: str = "127.0.0.1"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        here = (self.address, 0)
        return await asyncio.open_connection(parts.hostname, parts.port, local_addr=here)


async def post_key(web: Web, key: str) -> Reply:
    return await web.send("POST", "/login", f"key={key}".encode(), FORM)


async def test_wrong_keys_are_logged_with_their_address_and_then_refused(site: Site) -> None:
    url = (await site.gateway(failed_logins_per_min=LIMIT)).url
    stranger = From(url, address="127.0.0.9")
    with capture_logs() as lines:
        assert (await post_key(stranger, WRONG)).status == 401
        for _ in range(LIMIT - 1):
            is_problem(await stranger.get("/v1/jobs", x_api_key=WRONG), 401, "bad_key")
        for _ in range(10):
            reply = await stranger.get("/v1/jobs", x_api_key=WRONG)
            assert is_problem(reply, 429, "login_limited")["retry_after"] == 12
            assert reply.headers["retry-after"] == "12"
        assert (await post_key(stranger, WRONG)).status == 429
        assert (await stranger.get("/v1/jobs?ticket=x")).status == 429
    said = [(line["event"], line["address"], line["key"], line["way"]) for line in lines]
    one = ("127.0.0.9", "0" * 12)
    assert said[0] == ("login_failed", *one, "login")
    assert said[1:LIMIT] == [("login_failed", *one, "api")] * (LIMIT - 1)
    assert said[LIMIT:] == [("login_limited", *one, "api")]  # one line for all of the flood
    assert WRONG not in repr(lines)


async def test_a_limited_stranger_does_not_lock_out_others(site: Site) -> None:
    """Neither others at other addresses, nor the owner of the key that is tried."""
    url = (await site.gateway(failed_logins_per_min=LIMIT)).url
    ring = open_keyring(site.url())
    key, text = await ring.create(("jobs:read", "observe"), "mine")
    stranger, other = From(url, address="127.0.0.9"), From(url, address="127.0.0.8")
    guess = f"tn_{key.id}_" + "0" * 64
    tries = [(await stranger.get("/v1/jobs", x_api_key=guess)).status for _ in range(LIMIT + 1)]
    assert tries == [401] * LIMIT + [429]
    is_problem(await other.get("/v1/jobs", x_api_key=WRONG), 401, "bad_key")
    is_problem(await other.get("/v1/jobs", x_api_key=guess), 429, "login_limited")
    for web in (other, stranger):  # also behind the address that the stranger uses
        assert (await web.get("/v1/jobs", x_api_key=text)).status == 200
        assert (await post_key(web, text)).status == 303
    assert (await stranger.get("/livez")).status == 200
    assert (await stranger.get("/login")).status == 200
    is_problem(await stranger.get("/v1/jobs"), 401, "no_key")
    await ring.close()


async def test_behind_a_trusted_proxy_the_client_it_names_is_limited(site: Site) -> None:
    settings: dict[str, Any] = {"failed_logins_per_min": 2, "trusted_proxies": ("127.0.0.1",)}
    url = (await site.gateway(**settings)).url
    proxy, elsewhere = From(url), From(url, address="127.0.0.9")

    async def status(web: Web, client: str) -> int:
        reply = await web.get("/v1/jobs", x_api_key="nonsense", x_forwarded_for=client)
        return reply.status

    with capture_logs() as lines:
        # What stands before the address that the proxy added is the client's own invention.
        tried = [await status(proxy, f"10.9.9.{n}, 203.0.113.7") for n in range(3)]
        assert tried == [401, 401, 429]
        assert await status(proxy, "203.0.113.8") == 401
        assert await status(proxy, "not an address") == 401
        assert [await status(elsewhere, f"203.0.113.{n}") for n in range(3)] == [401, 401, 429]
    addresses = [line["address"] for line in lines if line["event"] == "login_failed"]
    assert addresses == ["203.0.113.7"] * 2 + ["203.0.113.8", "127.0.0.1"] + ["127.0.0.9"] * 2


SSO: dict[str, Any] = {
    "trusted_proxies": ("127.0.0.1",),
    "sso_groups": ("ops=admin", "acme=jobs:read+jobs:write@acme-key", "staff=observe"),
}


def named(user: str, groups: str = "") -> dict[str, str]:
    return {"x-forwarded-user": user, "x-forwarded-groups": groups}


async def test_a_person_whom_a_trusted_proxy_names_needs_no_key(site: Site) -> None:
    web = await site.web(**SSO)
    admin = {**named("Zoë@example.org".encode().decode("latin-1"), "people, ops")}
    assert (await web.send("GET", "/jobs", headers=admin)).status == 200
    page = await web.send("GET", "/", headers=admin)
    assert "Zoë@example.org" in page.body.decode()
    assert b"sign out" not in page.body
    own = {"sec-fetch-site": "same-origin"}
    form = b"verb=pause&queue=streams"
    assert (await web.send("POST", "/ui/queue", form, {**FORM, **admin})).status == 303
    assert (
        await web.send("POST", "/api/queues/streams/resume", b"", {**admin, **own})
    ).status == 200
    made = await web.send(
        "POST",
        "/v1/jobs",
        b'{"task":"chat","payload":{}}',
        {**admin, "content-type": "application/json"},
    )
    assert made.status == 202
    job = await site.ledger.get(made.json["job_id"])
    assert job is not None
    assert job.requester == "sso:Zoë@example.org"
    audit = await web.send("GET", "/api/audit", headers=admin)
    assert {entry["who"] for entry in audit.json["entries"]} == {"sso:Zoë@example.org"}


async def test_what_a_person_may_is_what_the_first_matching_group_says(site: Site) -> None:
    web = await site.web(**SSO)
    looks = named("sam", "staff")
    assert (await web.send("GET", "/jobs", headers=looks)).status == 200
    refused = await web.send("POST", "/api/queues/streams/pause", b"", looks)
    is_problem(refused, 403, "scope")
    tenant = named("ann", "staff,acme")  # acme stands before staff in the settings
    body = b'{"task":"chat","payload":{}}'
    json = {"content-type": "application/json"}
    made = await web.send("POST", "/v1/jobs", body, {**tenant, **json})
    job = await site.ledger.get(made.json["job_id"])
    assert job is not None
    assert job.requester == "acme-key"
    assert (await web.send("GET", "/jobs", headers=tenant)).status == 403
    is_problem(await web.send("GET", "/v1/jobs", headers=named("eve", "others")), 403, "scope")
    is_problem(await web.send("GET", "/v1/jobs", headers=named("eve")), 403, "scope")


@pytest.mark.parametrize(
    "settings",
    [
        {**SSO, "trusted_proxies": ("10.0.0.0/8", "::1", "unix")},
        {"trusted_proxies": ("127.0.0.1",), "anonymous": False},
        {"anonymous": False},
    ],
    ids=["another proxy", "no groups", "neither"],
)
async def test_headers_of_a_peer_that_is_not_trusted_are_ignored(
    site: Site, settings: dict[str, Any]
) -> None:
    """Loopback is trusted only where it is configured, and is not open beside people's names."""
    web = await site.web(**settings)
    for headers in (named("root", "ops"), {**named("root", "ops"), "x-forwarded-for": "10.0.0.1"}):
        is_problem(await web.send("GET", "/v1/jobs", headers=headers), 401, "no_key")
        assert (await web.send("GET", "/", headers=headers)).status == 303


async def test_a_request_with_no_name_or_with_two_is_refused(site: Site) -> None:
    web = await site.web(**SSO)
    is_problem(await web.get("/v1/jobs"), 401, "no_key")
    elsewhere = From(web.url, address="127.0.0.2")
    is_problem(await elsewhere.send("GET", "/v1/jobs", headers=named("root", "ops")), 401, "no_key")
    for wrong in (
        {"x-forwarded-user": "eve\r\nx-forwarded-user: root", "x-forwarded-groups": "ops"},
        {"x-forwarded-user": "eve", "x-forwarded-groups": "staff\r\nX-Forwarded-Groups: ops"},
        named("ro\tot", "ops"),
        named("\xff\xfe", "ops"),
        named("x" * 5_000, "ops"),
    ):
        is_problem(await web.send("GET", "/v1/jobs", headers=wrong), 401, "bad_key")


async def test_another_sites_page_cannot_use_a_persons_standing(site: Site) -> None:
    """The proxy's own cookie goes with every request of the browser, whoever made it send it."""
    web = await site.web(**SSO)
    admin = named("zoe", "ops")
    path = "/api/queues/streams/pause"
    for foreign in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ):
        is_problem(await web.send("POST", path, b"", {**admin, **foreign}), 403, "cross_site")
    script = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
    is_problem(await web.send("GET", "/v1/jobs", headers={**admin, **script}), 403, "cross_site")
    assert not (await site.ledger.counts()).paused
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await web.send("GET", "/jobs", headers={**admin, **link})).status == 200


async def test_a_persons_event_streams_and_tickets_work(site: Site) -> None:
    web = await site.web(**SSO)
    admin = named("zoe", "ops")
    body, json = b'{"task":"chat","payload":{}}', {"content-type": "application/json"}
    job_id = (await web.send("POST", "/v1/jobs", body, {**admin, **json})).json["job_id"]
    ticket = (await web.send("POST", "/v1/tickets", b"", admin)).json["ticket"]
    following = await web.follow(job_id, f"?ticket={ticket}")
    await asyncio.sleep(1.2)  # longer than a revoked key's stream lives
    await web.send("POST", f"/v1/jobs/{job_id}/cancel", b"", admin)
    assert (await following.all())[-1].name == "canceled"


async def test_a_proxy_on_a_unix_socket_is_trusted_by_its_word(site: Site, tmp_path: Path) -> None:
    path = str(tmp_path / "gateway.sock")
    gateway = await site.gateway(**{**SSO, "trusted_proxies": ("unix",), "unix_socket": path})
    web = Web(gateway.url)
    assert (await web.send("GET", "/v1/jobs", headers=named("zoe", "ops"))).status == 200


async def test_with_people_named_by_a_proxy_a_gateway_may_face_the_network_without_keys(
    site: Site,
) -> None:
    settings = GatewaySettings(queues=(site.url(),), host="0.0.0.0", port=0, **SSO)
    async with serving(settings) as running:
        web = Web(running.url.replace("0.0.0.0", "127.0.0.1"))
        is_problem(await web.get("/v1/jobs"), 401, "no_key")
        assert (await web.send("GET", "/v1/jobs", headers=named("zoe", "ops"))).status == 200


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sso_groups": ("ops=admin",)}, "needs gateway.trusted_proxies"),
        ({**SSO, "trusted_proxies": ("proxy.local",)}, "10.0.0.0/8 and unix"),
        ({**SSO, "trusted_proxies": ("10.0.0.1/8",)}, "10.0.0.0/8 and unix"),
        ({**SSO, "sso_groups": ("ops",)}, "GROUP=SCOPE"),
        ({**SSO, "sso_groups": ("ops=root",)}, "unknown scope 'root'"),
        ({**SSO, "sso_groups": ("ops=@acme",)}, "needs a scope"),
        ({"failed_logins_per_min": -1}, "failed_logins_per_min"),
    ],
)
async def test_settings_that_mean_nothing_are_refused_at_the_start(
    site: Site, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        await site.gateway(**settings)


async def test_a_person_of_a_tenant_has_the_quota_of_its_key(site: Site) -> None:
    ring = open_keyring(site.url())
    key, _ = await ring.create(["jobs:read"], "acme")
    await ring.limit(key.id, Quota(rate_per_s=0.001, rate_burst=1))
    await ring.close()
    web = await site.web(**{**SSO, "sso_groups": (f"acme=jobs:read@{key.id}",)})
    replies = [
        await web.send("GET", "/v1/jobs/none", headers=named("ann", "acme")) for _ in range(2)
    ]
    assert [reply.status for reply in replies] == [404, 429]


async def test_a_key_signs_in_only_so_often(site: Site) -> None:
    ring = open_keyring(site.url())
    texts = [(await ring.create(["observe"], name))[1] for name in ("one", "other")]
    await ring.close()
    web = await site.web()
    statuses = [(await post_key(web, texts[0])).status for _ in range(70)]
    assert statuses[:60] == [303] * 60
    assert 429 in statuses[60:]
    assert (await post_key(web, texts[1])).status == 303
