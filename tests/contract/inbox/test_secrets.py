"""Webhook secrets: shown once, sealed at rest, opened by whoever signs, moved by a rotation."""

import asyncio
import base64
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tenure.cli.config import load_config
from tenure.cli.console import run
from tenure.cli.keys import open_seal
from tenure.contracts.inbox.credentials import SECRET_PREFIX, Seal, WebhookSecrets
from tenure.core.errors import UsageError
from tenure.core.registry import open_part
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.vault import CannotOpen, Vault, new_kek, read_ring
from tests.contract.gateway.web import JSON, Web
from tests.contract.inbox.conftest import RawSql
from tests.contract.inbox_stage import InboxStage

OLD, NEW = new_kek("old"), new_kek("new")


@pytest.fixture
async def clean(sql: RawSql, inbox: InboxStage) -> AsyncGenerator[None]:
    """The schema is shared with other tests, which count wrapped keys."""
    await inbox.ledger.counts()
    await sql("DELETE FROM webhook_secrets")
    yield
    await sql("DELETE FROM webhook_secrets")


@pytest.fixture
def seal(monkeypatch: pytest.MonkeyPatch) -> Seal:
    monkeypatch.setenv("TENURE_VAULT_KEYS", OLD)
    made = open_seal(load_config())
    assert made is not None
    return made


def opened(inbox: InboxStage, ring: str = OLD) -> WebhookSecrets:
    vault = Vault(read_ring(ring)) if ring else None
    made: WebhookSecrets = open_part(inbox.url, "endpoint_secrets", vault=vault)
    return made


async def texts(secrets: WebhookSecrets, requester: str) -> list[str]:
    try:
        return [one.text() for one in await secrets.live(requester)]
    finally:
        await secrets.close()


async def at_rest(inbox: InboxStage, sql: RawSql) -> str:
    """All that a thief of the database would have of it."""
    if "sqlite" in inbox.url:
        path = Path(inbox.url.partition("sqlite:///")[2].partition("?")[0])
        files = [path, path.with_name(path.name + "-wal")]
        return "".join(file.read_bytes().decode("latin-1") for file in files if file.exists())
    tables = await sql("SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema()")
    rows = [row for (table,) in tables for row in await sql(f"SELECT t::text FROM {table} t")]
    return "\n".join(text for (text,) in rows)


@pytest.mark.clause("I-43")
@pytest.mark.usefixtures("clean")
async def test_a_requester_makes_webhook_secrets_and_the_last_two_are_live(
    inbox: InboxStage, sql: RawSql, seal: Seal
) -> None:
    ring = open_keyring(inbox.url)
    key, text = await ring.create(("jobs:write", "jobs:read"), "anna")
    settings = GatewaySettings(queues=(inbox.url,), port=0, route_options={"seal": seal})
    made = []
    async with serving(settings) as running:
        web = Web(running.url, {"authorization": f"Bearer {text}"})
        for _ in range(3):
            reply = await web.send("POST", "/transcode/webhook-secret", b"", JSON)
            assert reply.status == 201, reply.body
            made.append(reply.json["secret"])
    await ring.revoke(key.id)
    await ring.close()
    assert all(secret.startswith(SECRET_PREFIX) for secret in made)
    assert await texts(opened(inbox), key.id) == [made[2], made[1]]
    assert await texts(opened(inbox), "somebody-else") == []
    found = await at_rest(inbox, sql)
    assert key.id in found
    for secret in made:
        coded = secret.removeprefix(SECRET_PREFIX)
        raw = base64.b64decode(coded)
        assert not [form for form in (coded, raw.hex(), raw.decode("latin-1")) if form in found]


@pytest.mark.clause("I-43")
@pytest.mark.usefixtures("clean")
async def test_renewed_secrets_leave_no_rows_behind(
    inbox: InboxStage, sql: RawSql, seal: Seal
) -> None:
    secrets = opened(inbox)
    theirs = await secrets.renew("bert", seal)
    made = [await secrets.renew("anna", seal) for _ in range(20)]
    rows = await sql(
        "SELECT expires_ms > 0 FROM webhook_secrets WHERE requester_id = 'anna' ORDER BY id"
    )
    assert [bool(expires) for (expires,) in rows] == [True, False]
    assert await texts(secrets, "anna") == [made[-1], made[-2]]
    assert await texts(opened(inbox), "bert") == [theirs]


@pytest.mark.clause("I-43")
@pytest.mark.usefixtures("clean")
async def test_a_renewal_removes_secrets_from_before_a_bounded_number_at_a_time(
    inbox: InboxStage, sql: RawSql, seal: Seal
) -> None:
    for number in range(250):
        await sql(
            "INSERT INTO webhook_secrets (requester_id, secret, created_ms, expires_ms, name)"
            " VALUES ('anna', 'whsec_b2xk', 1, 2, ?)",
            f"webhook-secret/old-{number}",
        )
    secrets = opened(inbox)
    left = []
    for _ in range(4):
        await secrets.renew("anna", seal)
        ((count,),) = await sql("SELECT count(*) FROM webhook_secrets")
        left.append(count)
    assert left == [151, 52, 2, 2]
    await secrets.close()


@pytest.mark.clause("I-43")
@pytest.mark.usefixtures("clean")
async def test_a_gateway_without_a_key_ring_makes_no_secrets(inbox: InboxStage) -> None:
    ring = open_keyring(inbox.url)
    key, text = await ring.create(("jobs:write",), "bert")
    async with serving(GatewaySettings(queues=(inbox.url,), port=0)) as running:
        web = Web(running.url, {"authorization": f"Bearer {text}"})
        reply = await web.send("POST", "/transcode/webhook-secret", b"", JSON)
    await ring.revoke(key.id)
    await ring.close()
    assert reply.status == 422
    assert "key ring" in reply.json["detail"]


@pytest.mark.clause("I-43")
@pytest.mark.usefixtures("clean")
async def test_a_sealed_secret_opens_with_its_ring_and_for_its_requester_only(
    inbox: InboxStage, sql: RawSql, seal: Seal
) -> None:
    secrets = opened(inbox, ring="")
    made = await secrets.renew("anna", seal)
    with pytest.raises(UsageError, match="key ring"):
        await texts(secrets, "anna")
    assert await texts(opened(inbox), "anna") == [made]
    await sql("UPDATE webhook_secrets SET requester_id = 'thief'")
    with pytest.raises(CannotOpen):
        await texts(opened(inbox), "thief")


@pytest.mark.clause("I-43")
@pytest.mark.usefixtures("clean")
async def test_a_secret_from_before_is_sealed_when_it_is_used(
    inbox: InboxStage, sql: RawSql
) -> None:
    await lies_open(sql, "anna", "whsec_Y2FuYXJ5LW9mLWFubmE=")
    assert await texts(opened(inbox, ring=""), "anna") == ["whsec_Y2FuYXJ5LW9mLWFubmE="]
    assert await open_ones(sql) == ["anna"]
    for _ in range(2):
        assert await texts(opened(inbox), "anna") == ["whsec_Y2FuYXJ5LW9mLWFubmE="]
        assert await open_ones(sql) == []


@pytest.mark.clause("I-42", "I-43")
@pytest.mark.usefixtures("clean")
async def test_a_rotation_seals_what_lies_open_and_moves_the_rest(
    inbox: InboxStage, sql: RawSql, seal: Seal, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = opened(inbox)
    made = await secrets.renew("bert", seal)
    await secrets.close()
    await lies_open(sql, "anna", "whsec_Y2FuYXJ5LW9mLWFubmE=")
    ((before,),) = await sql("SELECT encrypted FROM webhook_secrets WHERE requester_id = 'bert'")
    monkeypatch.setenv("TENURE_VAULT_KEYS", f"{NEW}\n{OLD}")
    # 8: the schema is shared, and other tests sealed under keys that this ring has not.
    assert await asyncio.to_thread(run, ["keys", "rotate", "-q", inbox.url]) in (0, 8)
    rows = await sql("SELECT requester_id, secret, kek_id FROM webhook_secrets ORDER BY 1")
    assert rows == [("anna", "", "new"), ("bert", "", "new")]
    ((after,),) = await sql("SELECT encrypted FROM webhook_secrets WHERE requester_id = 'bert'")
    assert bytes(after) == bytes(before)
    assert await texts(opened(inbox, ring=NEW), "bert") == [made]
    assert await texts(opened(inbox, ring=NEW), "anna") == ["whsec_Y2FuYXJ5LW9mLWFubmE="]


async def lies_open(sql: RawSql, requester: str, secret: str) -> None:
    """A row as an older version wrote it."""
    await sql(
        "INSERT INTO webhook_secrets (requester_id, secret, created_ms, name) VALUES (?, ?, 1, ?)",
        *(requester, secret, f"webhook-secret/{requester}"),
    )


async def open_ones(sql: RawSql) -> list[Any]:
    found = await sql("SELECT requester_id FROM webhook_secrets WHERE secret <> ''")
    return [requester for (requester,) in found]
