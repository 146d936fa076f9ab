"""Options of a PostgreSQL URL reach every connection: the queue's own and those beside it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tenure.cli.doctor import postgres_findings
from tenure.cli.project import migrated
from tenure.core.errors import StoreUnreachable
from tenure.core.registry import open_ledger, open_part, parse_url
from tenure.dashboard.audit import AuditEntry, open_audit
from tenure.gateway.keyrings import open_keyring
from tests.contract.adapters import Servers

Door = Callable[[str], Awaitable[Any]]


async def _migrate(url: str) -> Any:
    return await migrated(parse_url(url))


async def _key_ring(url: str) -> Any:
    ring = open_keyring(url)
    try:
        return await ring.create(["admin"], "name")
    finally:
        await ring.close()


async def _audit(url: str) -> Any:
    log = open_audit(url, None)
    try:
        await log.add(AuditEntry(ts_ms=1, who="me", action="retry", ids=("a",)))
        return await log.list()
    finally:
        await log.close()


async def _ledger(url: str) -> Any:
    ledger = open_ledger(url)
    try:
        return await ledger.counts()
    finally:
        await ledger.close()


DOORS: dict[str, Door] = {
    "db migrate": _migrate,
    "the key ring": _key_ring,
    "the audit log": _audit,
    "the ledger": _ledger,
}


def with_options(server: str, **options: str) -> str:
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items())
    return f"{server}{'&' if '?' in server else '?'}{query}"


@pytest.mark.parametrize("contract", ["inbox", "plane"])
@pytest.mark.parametrize("door", DOORS)
async def test_a_certificate_authority_that_does_not_exist_is_an_error_at_every_door(
    servers: Servers, tmp_path: Path, contract: str, door: str
) -> None:
    schema = f"tls_{secrets.token_hex(4)}"
    plain = with_options(f"{contract}+{servers.postgres()}", schema=schema)
    await _migrate(plain)
    strict = with_options(plain, sslmode="verify-full", sslrootcert=str(tmp_path / "no-ca.pem"))
    with pytest.raises(StoreUnreachable):
        await DOORS[door](strict)
    await DOORS[door](plain)


async def test_doctor_asks_the_server_with_the_options_of_the_url(
    servers: Servers, tmp_path: Path
) -> None:
    strict = with_options(
        f"inbox+{servers.postgres()}", sslmode="verify-full", sslrootcert=str(tmp_path / "no-ca")
    )
    (finding,) = await postgres_findings(open_part(strict, "database").database.url)
    assert finding.level == "problem"


@pytest.mark.parametrize("door", DOORS)
async def test_the_host_of_the_options_is_a_socket_at_every_door(
    servers: Servers, tmp_path: Path, door: str
) -> None:
    """A relay listens on a socket; the address of the URL itself leads nowhere."""
    server = urlsplit(servers.postgres())
    relayed = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal relayed
        relayed += 1
        far = await asyncio.open_connection(server.hostname, server.port)
        await asyncio.gather(_pump(reader, far[1]), _pump(far[0], writer))

    socket = tmp_path / ".s.PGSQL.5499"
    listening = await asyncio.start_unix_server(relay, str(socket))
    schema = f"host_{secrets.token_hex(4)}"
    await _migrate(with_options(f"inbox+{servers.postgres()}", schema=schema))
    nowhere = f"inbox+postgresql://{server.username}:{server.password}@nowhere.invalid{server.path}"
    url = with_options(nowhere, schema=schema, host=str(tmp_path), port="5499")
    try:
        await DOORS[door](url)
    finally:
        listening.close()
    assert relayed


async def test_name_and_server_settings_of_the_url_are_those_of_the_session(
    servers: Servers,
) -> None:
    schema = f"named_{secrets.token_hex(4)}"
    url = with_options(
        f"inbox+{servers.postgres()}",
        schema=schema,
        application_name="billing",
        options="-c work_mem=7MB",
        connect_timeout="9",
    )
    await _migrate(url)
    engine = open_part(url, "database")
    async with engine.database.connection() as connection:
        assert await connection.fetchval("SHOW application_name") == "billing"
        assert await connection.fetchval("SHOW work_mem") == "7MB"
        assert await connection.fetchval("SHOW search_path") == schema
    await engine.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
