"""An object store of a tenant that sends more than it was asked for: the worker stays small."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tenure.core.outcome import Fatal, Retry
from tenure.core.transcode import Place
from tenure.egress import Client, Guard, GuardedProxy, Policy, proxy
from tenure.transcode.storage import Credentials, Mover, TranscodeSettings

MIB = 1024 * 1024
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
ERROR = b"HTTP/1.1 400 X\r\nContent-Type: application/xml\r\n" + CHUNKED
LISTING = b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\n" + CHUNKED
FOUND = (
    b'HTTP/1.1 200 OK\r\nETag: "x"\r\nLast-Modified: Wed, 18 Nov 2026 02:00:00 GMT\r\n'
    b"Content-Length: %d\r\n"
)


class Store:
    """Answers a connection with the next of `heads` and 1 MiB; with the last one, `most` bytes."""

    def __init__(self, heads: list[bytes], most: int) -> None:
        self.heads, self.most = heads, most
        self.place = Place()
        self.sent = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        last = len(self.heads) == 1
        head = self.heads[0] if last else self.heads.pop(0)
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            chunked = head.endswith(CHUNKED)
            block = b"100000\r\n" + b"x" * MIB + b"\r\n" if chunked else b"x" * MIB
            for _ in range(self.most // MIB if last else 1):
                writer.write(block)
                await writer.drain()
                self.sent += MIB
            writer.write(b"0\r\n\r\n" if chunked else b"")
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # it was cut off
        finally:
            writer.close()


@asynccontextmanager
async def hostile(*heads: bytes, most: int = 200 * MIB) -> AsyncIterator[tuple[Store, Mover]]:
    store = Store(list(heads), most)
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store.place = Place(url="s3://bucket/key", endpoint=f"http://127.0.0.1:{port}")
    guard = Guard(Policy(allow=("127.0.0.1/32",)))
    client = Client(guard)
    try:
        async with GuardedProxy(guard) as between, asyncio.timeout(60):
            yield store, Mover(client, between, TranscodeSettings())
    finally:
        server.close()
        await client.close()


async def fetch(mover: Mover, place: Place, file: Path, **source: str) -> int:
    async def no_progress(done: int, total: int) -> None: ...

    return await mover.fetch(
        place,
        Credentials(1, source, {}),
        file,
        check_room=lambda size, fetched: None,
        on_progress=no_progress,
    )


@pytest.mark.clause("I-54")
@pytest.mark.parametrize(
    ("does", "heads"),
    [
        ("fetch", [ERROR]),
        ("fetch", [FOUND % (500 * MIB) + b"\r\n", ERROR]),  # the error comes when it is resumed
        ("put", [ERROR]),
        ("list", [LISTING]),
    ],
    ids=["fetch", "resume", "put", "list"],
)
async def test_an_endless_answer_of_a_store_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str, heads: list[bytes]
) -> None:
    monkeypatch.setattr(proxy, "_AHEAD_S_MAX", 0.2)
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1_000)
    keys = Credentials(1, {}, {})
    async with hostile(*heads) as (store, mover):
        if does == "list":  # then older outputs stay
            await mover.remove_older(store.place, keys, "job", 2)
        else:
            call = (
                fetch(mover, store.place, file)
                if does == "fetch"
                else mover.put(store.place, keys, "key", file, "video/mp4")
            )
            with pytest.raises(Retry, match="more than 16777216 bytes that were not expected"):
                await call
        assert store.sent < 50 * MIB  # 16, and what the buffers of sockets hold


@pytest.mark.clause("I-54")
async def test_a_source_larger_than_what_a_store_may_be_ahead_is_fetched_whole(
    tmp_path: Path,
) -> None:
    async with hostile(FOUND % (100 * MIB) + b"\r\n", most=100 * MIB) as (store, mover):
        assert await fetch(mover, store.place, tmp_path / "file") == 100 * MIB


@pytest.mark.clause("I-54")
async def test_a_source_that_goes_on_after_its_announced_size_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "file"
    async with hostile(FOUND % 1_000 + CHUNKED, most=100 * MIB) as (store, mover):
        with pytest.raises(Fatal, match="goes on after the 1000 bytes"):
            await fetch(mover, store.place, file)
        assert file.stat().st_size <= 1_000


@pytest.mark.parametrize("text", ["a\nb", "a\r\nX: y", "\0", "a\n"])
async def test_stored_credentials_with_control_characters_end_the_job(
    tmp_path: Path, text: str
) -> None:
    async with hostile(ERROR, most=0) as (store, mover):
        with pytest.raises(Fatal, match="hold a control character") as refused:
            await fetch(
                mover, store.place, tmp_path / "f", access_key_id="A", secret_access_key=text
            )
    assert refused.value.code == "bad_credentials"
