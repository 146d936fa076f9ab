"""How the Redis client logs in: credentials that change are asked for at every dial."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import quote

import pytest

from tenure.core.errors import ReplyLost, ServerError, StoreUnreachable
from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import BulkRedis, Redis

TOKENS = ["first"]


def newest() -> tuple[str, str]:
    """A provider, as one for the tokens of a cloud would be."""
    return "ann", TOKENS[-1]


def failing() -> str:
    raise RuntimeError("the secret is hush")


@pytest.fixture
async def admin(server: EmbeddedRedis) -> AsyncGenerator[Redis]:
    """Ann's password is `first`."""
    TOKENS[:] = ["first"]
    client = Redis(server.url)
    await client.call("ACL", "SETUSER", "ann", "reset", "on", ">first", "~*", "+@all")
    yield client
    await client.call("ACL", "DELUSER", "ann")
    await client.close()


async def rotate(admin: Redis) -> None:
    """Ann has another password, and her connections are closed, as managed servers do."""
    await admin.call("ACL", "SETUSER", "ann", "resetpass", ">second")
    await admin.call("CLIENT", "KILL", "USER", "ann")


async def works_after(client: Redis) -> bool:
    """Whether the client logs in again; the first call may find the closed connection."""
    try:
        await client.call("PING")
    except (StoreUnreachable, ReplyLost):
        await client.call("PING")
    return True


async def test_a_file_that_rotates_is_read_at_every_dial(
    server: EmbeddedRedis, admin: Redis, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    client = Redis(f"redis://ann@127.0.0.1:{server.port}/0?password_file={quote(str(file))}")
    assert await client.call("ACL", "WHOAMI") == b"ann"
    file.write_text("second\n")
    await rotate(admin)
    assert await works_after(client)
    await client.close()


async def test_a_function_is_called_at_every_dial(server: EmbeddedRedis, admin: Redis) -> None:
    url = f"redis://127.0.0.1:{server.port}/0?credentials={__name__}:newest"
    client = Redis(url)
    assert await client.call("ACL", "WHOAMI") == b"ann"
    TOKENS.append("second")
    await rotate(admin)
    assert await works_after(client)
    await client.close()
    with BulkRedis(url) as bulk:
        assert bulk.call("ACL", "WHOAMI") == b"ann"


async def test_a_command_prints_the_password(server: EmbeddedRedis, admin: Redis) -> None:
    command = quote(f"{sys.executable} -c \"print('first')\"")
    client = Redis(f"redis://ann@127.0.0.1:{server.port}/0?password_command={command}")
    assert await client.call("ACL", "WHOAMI") == b"ann"
    await client.close()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (f"credentials={__name__}:failing", f"no credentials from {__name__}:failing"),
        ("password_file=no-such-file", "no credentials from no-such-file"),
        ("password_command=false%20hush", "no credentials from the password_command"),
    ],
)
async def test_credentials_that_cannot_be_had_leave_the_store_unreachable(
    server: EmbeddedRedis, option: str, says: str
) -> None:
    """A worker tries again: the file may be about to be written. No secret is told."""
    client = Redis(f"redis://127.0.0.1:{server.port}/0?{option}")
    with pytest.raises(StoreUnreachable, match=says) as caught:
        await client.call("PING")
    assert "hush" not in f"{caught.value!r} {caught.value.__cause__!r} {client!r}"
    await client.close()


async def test_a_wrong_password_is_told(server: EmbeddedRedis, admin: Redis) -> None:
    client = Redis(f"redis://ann:wrong@127.0.0.1:{server.port}/0")
    with pytest.raises(ServerError, match="refused the user and password"):
        await client.call("PING")
    await client.close()
