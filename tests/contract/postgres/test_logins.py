"""Passwords of PostgreSQL that are looked up at every connect, at every place that connects."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import quote, urlsplit

import asyncpg
import pytest

from tenure.cli.project import migrated
from tenure.core.errors import StoreUnreachable, UsageError
from tenure.core.registry import open_part, parse_url
from tenure.store.postgres import Postgres
from tenure.store.postgres.address import libpq_url
from tests.contract.adapters import Servers
from tests.contract.ledger.test_url_options import DOORS, with_options

WRONG = "not-the-password"


class Login:
    """A server whose URL has no password, and where the password is."""

    def __init__(self, server: str, folder: Path) -> None:
        parts = urlsplit(server)
        assert parts.password
        self.password = parts.password
        self.user = parts.username
        self.file = folder / "password"
        self.file.write_text(self.password + "\n")
        self.url = parts._replace(netloc=f"{parts.username}@{parts.hostname}:{parts.port}").geturl()


@pytest.fixture
def login(servers: Servers, tmp_path: Path) -> Login:
    return Login(servers.postgres_itself(), tmp_path)


@pytest.fixture
async def schema(servers: Servers) -> AsyncGenerator[str]:
    name = f"login{secrets.token_hex(4)}"
    await migrated(parse_url(f"inbox+{servers.postgres_itself()}?schema={name}"))
    yield name
    connection = await asyncpg.connect(servers.postgres_itself())
    await connection.execute(f"DROP SCHEMA {name} CASCADE")
    await connection.close()


@pytest.mark.parametrize("source", ["password_file", "password_command", "credentials"])
@pytest.mark.parametrize("door", DOORS)
async def test_the_password_comes_from_a_file_a_command_or_a_function(
    login: Login, schema: str, source: str, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(login.file.parent)
    module = f"provider_{secrets.token_hex(4)}"
    code = f"def now():\n    return {login.user!r}, open({str(login.file)!r}).read().strip()\n"
    (login.file.parent / f"{module}.py").write_text(code)
    value = {
        "password_file": str(login.file),
        "password_command": f"cat '{login.file}'",
        "credentials": f"{module}:now",
    }[source]
    url = with_options(f"inbox+{login.url}", schema=schema, **{source: value})
    await DOORS[door](url)
    login.file.write_text(WRONG)
    with pytest.raises(StoreUnreachable) as refused:
        await DOORS[door](url)
    assert WRONG not in str(refused.value)


async def test_a_password_that_was_changed_is_read_at_the_next_connect(
    login: Login, schema: str
) -> None:
    """The server closes the connection; the file has the new password by then."""
    url = with_options(f"inbox+{login.url}", schema=schema, password_file=str(login.file))
    engine = open_part(url, "database")
    found = await engine.database.fetch("SELECT pg_backend_pid() AS pid", [])
    login.file.write_text(WRONG)
    assert await engine.database.fetch("SELECT 1", [])  # nothing connects anew
    with pytest.raises(Exception, match=r"ended the call|broke"):
        await engine.database.fetch("SELECT pg_terminate_backend($1)", [found[0]["pid"]])
    with pytest.raises(StoreUnreachable, match="password authentication failed"):
        await engine.database.fetch("SELECT 1", [])
    login.file.write_text(login.password)
    assert await engine.database.fetch("SELECT 1", [])
    await engine.close()


async def test_a_login_that_cannot_be_found_is_an_error_without_the_secret(login: Login) -> None:
    command = quote(f"{sys.executable} -c exit(1) {WRONG}")
    database = Postgres(f"{login.url}?password_command={command}", schema="public")
    with pytest.raises(StoreUnreachable, match="no credentials from the password_command") as none:
        await database.fetch("SELECT 1", [])
    assert WRONG not in str(none.value)
    await database.close()
    for query, why in {
        "password_file=/a&password_command=b": "one of password_file",
        "credentials=no.such:function": "there is no such function",
    }.items():
        with pytest.raises(UsageError, match=why):
            open_part(f"inbox+{login.url}?{query}", "database")


def test_a_client_in_bulk_gets_the_login_and_only_what_it_knows(login: Login) -> None:
    url = f"{login.url}?password_file={quote(str(login.file))}&sslmode=prefer"
    made = libpq_url(f"{url}&pooling=session&idle_s=3&work_mem=9MB&options=-c%20jit%3Doff")
    user, password = f"user={login.user}", f"password={quote(login.password)}"
    options = quote("-c jit=off -c work_mem=9MB")
    assert made == f"{login.url}?sslmode=prefer&options={options}&{user}&{password}"
