"""Credential refresh against a real requester and a real store (section 7)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tenure.core.errors import LeaseLost
from tenure.core.lease import Lease
from tenure.core.outcome import Fatal, Retry
from tenure.egress import Client, Guard, Policy
from tenure.vault import Binding, Secret, Vault, new_kek, read_ring
from tenure.webhooks import MemoryNonces, new_secret, read_secret, verify
from tenure.webhooks.refresh import Refresher, RefreshSettings
from tests.contract.cli.pages import page
from tests.contract.egress.scripted import Scripted, scripted
from tests.contract.vault.credentials import Credentials
from tests.waiting import until

SECRET = new_secret()
QUICK = RefreshSettings(attempts_max=3, wait_ms=300, poll_ms=20)
CANARY = "canary-fresh-key"


class OneSecret:
    async def live(self, requester_id: str) -> Sequence[Secret]:
        return [Secret(read_secret(SECRET))]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made = Client(Guard(Policy(allow=("127.0.0.1/32",))))
    yield made
    await made.close()


@pytest.fixture
def vault() -> Vault:
    return Vault(read_ring(new_kek("k1")))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Credentials]:
    made = Credentials(tmp_path / "jobs.db")
    yield made
    await made.close()


def lease(fence: int = 1, job_id: str = "j1") -> Lease:
    return Lease(
        job_id=job_id,
        queue="inbox",
        task="transcode",
        payload=b"{}",
        attempt=1,
        max_attempts=3,
        fence=fence,
        token="",
        lease_until_ms=0,
        lease_ms=15_000,
    )


def answered(status: int, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def at(server: Scripted) -> str:
    return f"http://127.0.0.1:{server.port}/refresh"


def refresher(client: Client, store: Credentials, vault: Vault) -> Refresher:
    return Refresher(client, OneSecret(), store, vault, settings=QUICK)


@pytest.mark.clause("I-45")
async def test_credentials_in_the_answer_are_sealed_and_raise_the_version(
    client: Client, store: Credentials, vault: Vault
) -> None:
    fresh = json.dumps({"credentials": {"source": {"secret_access_key": CANARY}}}).encode()
    async with scripted(lambda head, body: answered(200, fresh)) as server:
        await store.add(vault, "j1", "acme", {"old": 1}, at(server))
        stored = await refresher(client, store, vault).refresh(lease(), 1)
    assert (stored.version, stored.sealed is not None) == (2, True)
    assert stored.sealed is not None
    opened = await vault.open(stored.sealed, Binding("j1", "acme", 2))
    assert json.loads(opened.text())["source"]["secret_access_key"] == CANARY
    assert CANARY.encode() not in repr(store.row("j1")).encode()


@pytest.mark.clause("I-45")
@pytest.mark.runs("docs/howto/transcoding.md:json")
async def test_the_request_is_signed_like_a_webhook_and_names_the_version(
    client: Client, store: Credentials, vault: Vault
) -> None:
    async with scripted(lambda head, body: answered(200, b'{"credentials": {}}')) as server:
        await store.add(vault, "j1", "acme", {}, at(server))
        await refresher(client, store, vault).refresh(lease(), 1)
    lines = server.heads[0].decode().split("\r\n")[1:-2]
    headers = dict(line.split(": ", 1) for line in lines)
    verified = await verify(server.bodies[0], headers, [SECRET], nonces=MemoryNonces())
    assert verified.event["type"] == "credentials.refresh"
    assert (verified.event["job_id"], verified.event["credential_version"]) == ("j1", 1)
    shown = page("docs/howto/transcoding.md").blocks[-1]
    assert json.loads(shown.text).keys() == verified.event.keys()


@pytest.mark.clause("I-45")
async def test_credentials_that_come_through_the_api_are_waited_for(
    client: Client, store: Credentials, vault: Vault
) -> None:
    async with scripted(lambda head, body: answered(202)) as server:
        await store.add(vault, "j1", "acme", {"old": 1}, at(server))
        refreshing = asyncio.create_task(refresher(client, store, vault).refresh(lease(), 1))
        await until(lambda: server.heads, "the requester is asked")
        await store.update(vault, "j1", {"new": 2})
        stored = await refreshing
    assert stored.version == 2
    assert len(server.heads) == 1


@pytest.mark.clause("I-46")
async def test_a_version_that_never_rises_ends_the_job_after_the_limit(
    client: Client, store: Credentials, vault: Vault
) -> None:
    async with scripted(lambda head, body: answered(204)) as server:
        await store.add(vault, "j1", "acme", {"old": 1}, at(server))
        with pytest.raises(Fatal, match="3 refreshes brought no newer ones"):
            await refresher(client, store, vault).refresh(lease(), 1)
    assert len(server.heads) == 3


@pytest.mark.clause("I-45")
async def test_newer_credentials_that_are_there_already_need_no_request(
    client: Client, store: Credentials, vault: Vault
) -> None:
    async with scripted(lambda head, body: answered(500)) as server:
        await store.add(vault, "j1", "acme", {"old": 1}, at(server))
        await store.update(vault, "j1", {"new": 2})
        assert (await refresher(client, store, vault).refresh(lease(), 1)).version == 2
    assert server.heads == []


@pytest.mark.clause("I-46")
async def test_a_stale_worker_may_not_ask_for_credentials(
    client: Client, store: Credentials, vault: Vault
) -> None:
    async with scripted(lambda head, body: answered(200)) as server:
        await store.add(vault, "j1", "acme", {"old": 1}, at(server))
        store.reclaim("j1")
        with pytest.raises(LeaseLost):
            await refresher(client, store, vault).refresh(lease(fence=1), 1)
    assert server.heads == []


@pytest.mark.clause("I-46")
async def test_a_claim_lost_while_asking_writes_nothing(
    client: Client, store: Credentials, vault: Vault
) -> None:
    def steal(head: bytes, body: bytes) -> bytes:
        store.reclaim("j1")
        return answered(200, b'{"credentials": {"stolen": true}}')

    async with scripted(steal) as server:
        await store.add(vault, "j1", "acme", {"old": 1}, at(server))
        with pytest.raises(LeaseLost):
            await refresher(client, store, vault).refresh(lease(fence=1), 1)
    assert store.row("j1")[3] == 1, "the version is as it was"


@pytest.mark.clause("I-46")
@pytest.mark.parametrize(
    ("status", "signal"), [(500, Retry), (429, Retry), (404, Retry), (410, Fatal)]
)
async def test_a_refusal_of_the_requester_ends_the_attempt_by_its_class(
    client: Client, store: Credentials, vault: Vault, status: int, signal: type[Exception]
) -> None:
    async with scripted(lambda head, body: answered(status)) as server:
        await store.add(vault, "j1", "acme", {"old": 1}, at(server))
        with pytest.raises(signal):
            await refresher(client, store, vault).refresh(lease(), 1)
    assert store.row("j1")[4] == 1, "it counts as a refresh"


@pytest.mark.clause("I-53")
@pytest.mark.parametrize("body", [b"x" * 70_000, b'{"credentials": {"a": "' + b"x" * 70_000])
async def test_an_answer_without_end_is_not_taken(
    client: Client, store: Credentials, vault: Vault, body: bytes
) -> None:
    async with scripted(lambda head, _: answered(200, body)) as server:
        await store.add(vault, "j1", "acme", {"old": 1}, at(server))
        with pytest.raises(Fatal, match="longer than 65536 bytes"):
            await refresher(client, store, vault).refresh(lease(), 1)


@pytest.mark.clause("I-53")
async def test_a_refresh_url_inside_our_network_is_refused(
    store: Credentials, vault: Vault
) -> None:
    async with scripted(lambda head, body: answered(200)) as server:
        await store.add(vault, "j1", "acme", {"old": 1}, at(server))
        with pytest.raises(Fatal, match="no refresh"):
            await refresher(Client(Guard()), store, vault).refresh(lease(), 1)
    assert server.connections == 0


@pytest.mark.clause("I-45")
async def test_a_job_without_a_refresh_url_says_so(
    client: Client, store: Credentials, vault: Vault
) -> None:
    await store.add(vault, "j1", "acme", {"old": 1})
    with pytest.raises(Fatal, match="names no refresh_url"):
        await refresher(client, store, vault).refresh(lease(), 1)


@pytest.mark.clause("I-45")
async def test_a_storm_of_refreshes_raises_each_version_once(
    client: Client, store: Credentials, vault: Vault
) -> None:
    """100 jobs at once, each with its worker and two stale ones that want credentials too."""
    async with scripted(lambda head, body: answered(200, b'{"credentials": {"new": 1}}')) as server:
        asking = []
        for number in range(100):
            name = f"j{number}"
            await store.add(vault, name, "acme", {"old": 1}, at(server))
            store.reclaim(name)
            store.reclaim(name)
            here = Refresher(client, OneSecret(), store, vault)  # which has time
            asking += [here.refresh(lease(fence, name), 1) for fence in (1, 2, 3)]
        answers = await asyncio.gather(*asking, return_exceptions=True)
    stale = [one for one in answers if isinstance(one, LeaseLost)]
    fresh = [one for one in answers if not isinstance(one, BaseException)]
    assert (len(stale), len(fresh)) == (200, 100)
    assert {one.version for one in fresh} == {2}
    assert all(store.row(f"j{number}")[3:5] == (2, 1) for number in range(100))
    assert len(server.heads) == 100
