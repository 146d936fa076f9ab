"""The Redis client over TLS: the server is verified, and may ask who we are."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import trustme

from tenure.core.errors import StoreUnreachable
from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import Redis


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(
        tmp_path / "client.pem"
    )
    return authority


@pytest.fixture
async def tls_port(server: EmbeddedRedis, authority: trustme.CA) -> AsyncGenerator[int]:
    """A TLS door before the server, which wants to see a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    authority.configure_trust(context)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        flows = (pump(reader, inner_writer), pump(inner_reader, writer))
        await asyncio.gather(*flows, return_exceptions=True)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    other = await asyncio.start_server(serve, "127.0.0.2", port, ssl=context)
    yield port
    listener.close()
    other.close()


async def test_a_verified_connection_carries_calls(tls_port: int, tmp_path: Path) -> None:
    files = f"cafile={tmp_path}/ca.pem&certfile={tmp_path}/client.pem"
    client = Redis(f"rediss://127.0.0.1:{tls_port}/0?{files}")
    replies = await asyncio.gather(*(client.call("ECHO", i) for i in range(200)))
    await client.close()
    assert replies == [str(i).encode() for i in range(200)]


async def test_a_server_that_cannot_be_verified_is_not_spoken_to(tls_port: int) -> None:
    client = Redis(f"rediss://127.0.0.1:{tls_port}/0")
    with pytest.raises(StoreUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
        await client.call("PING")
    await client.close()


async def test_a_server_is_used_unverified_if_the_url_says_so(
    tls_port: int, tmp_path: Path
) -> None:
    client_cert = f"certfile={tmp_path}/client.pem"
    client = Redis(f"rediss://127.0.0.1:{tls_port}/0?{client_cert}&ssl_cert_reqs=none")
    assert await client.call("PING") == b"PONG"
    await client.close()


async def test_the_host_name_is_checked_unless_the_url_says_otherwise(
    tls_port: int, tmp_path: Path
) -> None:
    """127.0.0.2 leads to the same server, and its certificate does not name it."""
    url = f"rediss://127.0.0.2:{tls_port}/0?cafile={tmp_path}/ca.pem&certfile={tmp_path}/client.pem"
    client = Redis(url)
    with pytest.raises(StoreUnreachable, match="IP address mismatch"):
        await client.call("PING")
    await client.close()
    client = Redis(f"{url}&check_hostname=false")
    assert await client.call("PING") == b"PONG"
    await client.close()


async def test_a_plain_server_behind_a_tls_url_is_told(server: EmbeddedRedis) -> None:
    client = Redis(f"rediss://127.0.0.1:{server.port}/0", connect_timeout_ms=2000)
    with pytest.raises(StoreUnreachable, match="does not speak TLS"):
        await client.call("PING")
    await client.close()


async def test_a_tls_server_behind_a_plain_url_is_told(tls_port: int) -> None:
    client = Redis(f"redis://127.0.0.1:{tls_port}/0", connect_timeout_ms=2000)
    with pytest.raises(StoreUnreachable, match="if this port speaks TLS, write rediss://"):
        await client.call("PING")
    await client.close()
