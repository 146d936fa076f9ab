"""Sessions of browsers: kept by the store, ended by it, and worth nothing to its readers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec
import pytest

from tenure.core.registry import open_part
from tenure.gateway.keyrings import JoinedKeyRings, open_keyring, open_side_store
from tenure.gateway.keys import SESSIONS_PER_KEY, KeyRing, MemoryKeyRing, secret_hash
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.sql.engine import INBOX
from tests.contract.adapters import Servers, Stage, adapters, served_url
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import Reply, Web
from tests.waiting import until

HOUR_MS = 3_600_000
OWN = {"sec-fetch-site": "same-origin"}
FORM = {"content-type": "application/x-www-form-urlencoded", **OWN}


class Place:
    """A queue, its ring and a gateway before them."""

    def __init__(self, stage: Stage, ring: KeyRing, web: Web) -> None:
        self.url = served_url(stage)
        self.ring = ring
        self.web = web

    async def sessions(self, key_id: str) -> list[str]:
        """Of one key: a store of several tests keeps those of all."""
        return [each.session_h for each in await self.ring.sessions() if each.key_id == key_id]

    async def stored(self) -> list[str]:
        """Every text that a reader of the store finds beside the keys."""
        side = open_side_store(self.url, "test")
        if side is None:
            engine = open_part(self.url, "database")
            rows = [
                *await engine.run(INBOX, "session_find", session_h=""),
                *await engine.run(INBOX, "key_list"),
            ]
            await engine.close()
            return [str(value) for row in rows for value in tuple(dict(row).values())]
        redis, prefix = side
        found = [
            *await redis.call("HGETALL", f"{prefix}tenure:sessions"),
            *await redis.call("HVALS", f"{prefix}tenure:keys"),
        ]
        await redis.close()
        texts = [raw.decode() for raw in found]
        inner = [msgspec.json.decode(text) for text in texts if text.startswith("{")]
        return texts + [str(value) for each in inner for value in each.values()]


@pytest.fixture(params=["streams", "inbox", "inbox_postgres"])
async def place(request: pytest.FixtureRequest, servers: Servers) -> AsyncGenerator[Place]:
    stage = await adapters(servers)[request.param].open(lease_ms=10_000)
    ring = open_keyring(served_url(stage))
    try:
        async with serving(GatewaySettings(queues=(served_url(stage),), port=0)) as running:
            yield Place(stage, ring, Web(running.url))
    finally:
        for key in await ring.list():  # the next test shares the schema
            await ring.revoke(key.id)
        await ring.close()
        await stage.close()


async def sign_in(web: Web, key: str, **headers: str) -> dict[str, str]:
    """The header with the cookie of a new session."""
    made = await web.send("POST", "/login", f"key={key}".encode(), {**FORM, **headers})
    assert made.status == 303, made
    return {"cookie": made.headers["set-cookie"].partition(";")[0]}


async def is_in(web: Web, cookie: dict[str, str]) -> bool:
    reply = await web.send("GET", "/jobs", headers=cookie)
    assert reply.status in (200, 303), reply
    return reply.status == 200


async def test_what_the_store_keeps_of_keys_and_sessions_opens_nothing(place: Place) -> None:
    """A cookie was once signed with the stored hash of a key, so a reader of the store made one."""
    key, text = await place.ring.create(["admin"], "me")
    cookie = await sign_in(place.web, text)
    assert await is_in(place.web, cookie)
    value = cookie["cookie"].partition("=")[2]
    assert await place.sessions(key.id) == [secret_hash(value)]
    stored = await place.stored()
    assert secret_hash(value) in stored
    assert key.secret_h in stored
    assert not [each for each in stored if value in each]
    until_s = int(time.time()) + 10 * 365 * 86_400
    words = f"tenure session {key.id} {until_s}".encode()
    signed = hmac.new(key.secret_h.encode(), words, hashlib.sha256).hexdigest()
    forged = [f"{key.id}.{until_s}.{signed}", *stored, *(each[:43] for each in stored)]
    for each in forged:
        wrong = {"cookie": f"tenure_session={each}"}
        reply = await place.web.send("GET", "/jobs", headers=wrong)
        assert (reply.status, reply.headers["location"]) == (303, "/login?next=%2Fjobs"), each


async def test_signing_out_ends_the_session_and_not_only_the_cookie(place: Place) -> None:
    _, text = await place.ring.create(["observe"], "me")
    one, two = await sign_in(place.web, text), await sign_in(place.web, text)
    out = await place.web.send("POST", "/logout", b"", {**OWN, **one})
    assert (out.status, out.headers["location"]) == (303, "/login")
    assert "Max-Age=0" in out.headers["set-cookie"]
    assert not await is_in(place.web, one)
    assert await is_in(place.web, two)


async def test_the_sessions_of_a_revoked_key_are_gone_from_the_store(place: Place) -> None:
    key, text = await place.ring.create(["observe"], "me")
    _, other = await place.ring.create(["observe"], "other")
    cookie, stays = await sign_in(place.web, text), await sign_in(place.web, other)
    assert await place.ring.revoke(key.id)
    assert await place.sessions(key.id) == []
    assert not await is_in(place.web, cookie)  # at once: it need not wait for the key's second
    assert await is_in(place.web, stays)


async def test_an_admin_ends_one_session_or_all_of_a_key(place: Place) -> None:
    key, text = await place.ring.create(["observe"], "me")
    one, two, three = [await sign_in(place.web, text) for _ in range(3)]
    first = secret_hash(one["cookie"].partition("=")[2])
    assert await place.ring.end_sessions(session_h=first) == 1
    assert [await is_in(place.web, each) for each in (one, two, three)] == [False, True, True]
    assert await place.ring.end_sessions(key_id=key.id) == 2
    assert [await is_in(place.web, each) for each in (two, three)] == [False, False]
    assert await place.ring.end_sessions(session_h=first, key_id=key.id) == 0


async def test_the_store_ends_sessions_by_age_and_by_idleness(place: Place) -> None:
    key, _ = await place.ring.create(["observe"], "me")
    long = await place.ring.open_session(key.id, HOUR_MS, HOUR_MS)
    aged = await place.ring.open_session(key.id, 200, HOUR_MS)
    idle = await place.ring.open_session(key.id, HOUR_MS, 200)

    async def both_over() -> bool:
        found = [await place.ring.find_session(secret_hash(each)) for each in (aged, idle)]
        return found == [None, None]

    await until(both_over, within_s=5)
    assert await place.sessions(key.id) == [secret_hash(long)]
    for text in (aged, idle):
        cookie = {"cookie": f"tenure_session={text}"}
        assert not await is_in(place.web, cookie)
    await place.ring.open_session(key.id, HOUR_MS, HOUR_MS)
    assert secret_hash(aged) not in await place.stored()


async def test_a_key_has_only_so_many_sessions_and_the_oldest_go(place: Place) -> None:
    key, _ = await place.ring.create(["observe"], "me")
    another, _ = await place.ring.create(["observe"], "other")
    other = await place.ring.open_session(another.id, HOUR_MS, HOUR_MS)
    first = await place.ring.open_session(key.id, HOUR_MS, HOUR_MS)
    await asyncio.sleep(0.002)  # sessions of one millisecond have no order
    for _ in range(SESSIONS_PER_KEY):
        await place.ring.open_session(key.id, HOUR_MS, HOUR_MS)
    kept = await place.sessions(key.id)
    assert len(kept) == SESSIONS_PER_KEY
    assert secret_hash(first) not in kept
    assert await place.sessions(another.id) == [secret_hash(other)]


async def test_the_use_of_a_session_is_noted_in_every_store(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.gateway.keyrings.TOUCH_MS", -1)
    key, _ = await place.ring.create(["observe"], "me")
    session_h = secret_hash(await place.ring.open_session(key.id, HOUR_MS, HOUR_MS))

    async def seen_ms(*, used: bool = True) -> int:
        session = await place.ring.find_session(session_h, used=used)
        assert session is not None
        return session.seen_ms

    begun = await seen_ms(used=False)

    async def noted() -> bool:
        return await seen_ms() > begun

    await until(noted)
    last = await seen_ms(used=False)
    assert await seen_ms(used=False) == last


async def test_a_session_that_is_used_does_not_become_idle() -> None:
    now = [1_000_000]
    ring = MemoryKeyRing(clock_ms=lambda: now[0])
    text = await ring.open_session("k", HOUR_MS, 1_000)
    for _ in range(3):
        now[0] += 900
        assert await ring.find_session(secret_hash(text)) is not None
    now[0] += 900
    assert await ring.find_session(secret_hash(text), used=False) is not None
    now[0] += 900
    assert await ring.find_session(secret_hash(text)) is None


async def test_the_use_of_a_session_is_noted_in_the_store_and_does_not_revive_it(
    site: Site,
) -> None:
    """Noting it is a write of its own: a session that was ended in between stays ended."""
    from tenure.gateway.keyrings import RedisKeyRing

    now = [1_000_000_000]
    ring = RedisKeyRing(site.redis, prefix=site.ns, clock_ms=lambda: now[0])
    text = await ring.open_session("k", 10 * HOUR_MS, HOUR_MS)
    for _ in range(3):
        now[0] += HOUR_MS - 1
        assert await ring.find_session(secret_hash(text)) is not None
    assert await ring.end_sessions(session_h=secret_hash(text)) == 1
    await site.redis.call("HSET", f"{site.ns}tenure:sessions:seen", secret_hash(text), now[0])
    assert await ring.find_session(secret_hash(text)) is None
    await site.redis.call("HSET", f"{site.ns}tenure:sessions", secret_hash(text), "no session")
    assert await ring.find_session(secret_hash(text)) is None
    assert await ring.sessions() == []


async def test_a_session_is_found_in_whichever_ring_its_key_lies() -> None:
    rings: Sequence[MemoryKeyRing] = [MemoryKeyRing(), MemoryKeyRing()]
    joined = JoinedKeyRings([ring] for ring in rings)
    key, _ = await rings[1].create(["observe"], "me")
    assert await joined.find(key.id) is not None
    text = await joined.open_session(key.id, HOUR_MS, HOUR_MS)
    assert len(await rings[1].sessions()) == 1
    found = await joined.find_session(secret_hash(text))
    assert found is not None
    assert found.key_id == key.id
    assert await joined.end_sessions(session_h=secret_hash(text)) == 1
    assert await joined.find_session(secret_hash(text)) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {},
    ],
)
async def test_a_page_of_another_site_cannot_sign_a_person_out(
    site: Site, headers: dict[str, str]
) -> None:
    web, ring = await site.web(), open_keyring(site.url())
    _, text = await ring.create(["observe"], "me")
    cookie = await sign_in(web, text)
    is_problem(await web.send("POST", "/logout", b"", {**cookie, **headers}), 403, "cross_site")
    assert (await web.send("GET", "/logout", headers={**cookie, **OWN})).status == 405
    assert await is_in(web, cookie)
    await ring.close()


async def test_the_pulse_of_a_page_ends_with_its_session(site: Site) -> None:
    web, ring = await site.web(), open_keyring(site.url())
    _, text = await ring.create(["observe"], "me")
    cookie = await sign_in(web, text)
    following = await web.stream("/live", **cookie)
    await web.send("POST", "/logout", b"", {**OWN, **cookie})
    async with asyncio.timeout(10):
        async for _event in following:
            pass
    await ring.close()


async def test_the_session_behind_tls_is_for_tls_alone(site: Site) -> None:
    web, ring = await site.web(), open_keyring(site.url())
    _, text = await ring.create(["observe"], "me")
    body = f"key={text}".encode()
    plain: Reply = await web.send("POST", "/login", body, FORM)
    host = web.url.removeprefix("http://")
    tls = await web.send("POST", "/login", body, {**FORM, "origin": f"https://{host}"})
    assert "Secure" not in plain.headers["set-cookie"]
    assert "; Secure" in tls.headers["set-cookie"]
    await ring.close()
