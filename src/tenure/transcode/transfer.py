"""Moves bytes: a source into a local file, a local file to its destination.

A source may lie in object storage, behind a signed URL that came with the credentials, or behind a
plain https URL. Sizes are checked before and while writing, since whoever serves the source also
says how large it is.
"""

from __future__ import annotations

import asyncio
import base64
import errno
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit, urlunsplit

import obstore

from tenure.core.outcome import Fatal, Retry
from tenure.egress import Client, EgressError, GuardedProxy, Limits, Refused, TooLarge
from tenure.egress.client import Body
from tenure.transcode.access import Credentials
from tenure.transcode.request import Place
from tenure.transcode.settings import TranscodeSettings
from tenure.transcode.storage import STORAGE_ERRORS, Opened, by_status, failure_of, open_store

_PIECE_BYTES = 4 * 1024 * 1024

Told = Callable[[int, int], Awaitable[None]]
"""Bytes so far, and of how many (0: unknown)."""
Room = Callable[[int, int], None]
"""Raises when a source of this size, of which so much is here, cannot be taken now."""


@dataclass(frozen=True, slots=True)
class Mover:
    """What a transfer needs: the guarded client, the guarded proxy, the limits."""

    client: Client
    proxy: GuardedProxy
    settings: TranscodeSettings

    async def fetch(
        self, place: Place, given: Credentials, file: Path, *, room: Room, told: Told
    ) -> int:
        """Copy the source to a file; its size."""
        signed = given.source.get("signed_url")
        url = signed if isinstance(signed, str) else place.url
        if urlsplit(url).scheme in ("https", "http"):
            return await self._fetch_url(url, file, room, told)
        opened = self._open(place, given.source)
        try:
            answer = await obstore.get_async(opened.store, opened.key)
            size = int(answer.meta["size"])
            self._check(size, room)
            stream = answer.stream(min_chunk_size=_PIECE_BYTES)
            return await self._write(file, stream, size, room, told)
        except STORAGE_ERRORS as error:
            raise failure_of(error, "source", self.proxy.failure) from None

    async def put(self, place: Place, given: Credentials, key: str, file: Path, kind: str) -> str:
        """Copy a file to its destination; where it lies now, as far as that may be shown."""
        urls = given.destination.get("signed_urls")
        signed = urls.get(file.name) if isinstance(urls, dict) else None
        if isinstance(signed, str):
            await self._put_url(signed, file, kind)
            return key
        opened = self._open(place, given.destination)
        path = opened.at(key)
        try:
            await obstore.put_async(
                opened.store, path, file, attributes=_attributes(place, kind), max_concurrency=2
            )
        except STORAGE_ERRORS as error:
            raise failure_of(error, "destination", self.proxy.failure) from None
        return path

    async def remove_older(self, place: Place, given: Credentials, job_id: str, fence: int) -> None:
        """Take away what earlier claims of this job left; they can publish nothing any more.

        Credentials that may only write cannot do this: then it is left.
        """
        if "signed_urls" in given.destination or not place.url:
            return
        opened = self._open(place, given.destination)
        prefix = opened.at(job_id) + "/"
        try:
            async for batch in obstore.list(opened.store, prefix):
                old = [str(one["path"]) for one in batch if _fence_of(one["path"], prefix) < fence]
                if old:
                    await obstore.delete_async(opened.store, old)
        except STORAGE_ERRORS:
            return

    async def remove(self, place: Place, given: Credentials, paths: list[str]) -> None:
        """Take back outputs of an attempt that failed; as far as the credentials permit."""
        if "signed_urls" in given.destination or not paths:
            return
        try:
            await obstore.delete_async(self._open(place, given.destination).store, paths)
        except STORAGE_ERRORS:
            return

    def _open(self, place: Place, credentials: Any) -> Opened:
        return open_store(
            place,
            credentials,
            proxy_url=self.proxy.url,
            local_root=self.settings.local_root,
            transfer_s_max=self.settings.transfer_s_max,
        )

    async def _fetch_url(self, url: str, file: Path, room: Room, told: Told) -> int:
        limits = Limits(total_ms=round(self.settings.transfer_s_max * 1000))
        address, headers = _signed_in(url)
        try:
            async with self.client.open("GET", address, headers=headers, limits=limits) as answer:
                if not 200 <= answer.status < 300:
                    raise by_status(answer.status, "source")
                said = answer.headers.get("content-length", "")
                size = int(said) if said.isdigit() else 0
                self._check(size, room)
                return await self._write(file, answer.pieces, size, room, told)
        except (Refused, TooLarge) as error:
            raise Fatal(f"source: {error}", code=error.code) from None
        except EgressError as error:
            raise Retry(None, f"source: {error}", code=error.code) from None

    async def _put_url(self, url: str, file: Path, kind: str) -> None:
        body = Body(await asyncio.to_thread(_size, file), _pieces(file))
        limits = Limits(total_ms=round(self.settings.transfer_s_max * 1000))
        address, headers = _signed_in(url)
        headers.append(("Content-Type", kind))
        try:
            async with self.client.open(
                "PUT", address, headers=headers, body=body, limits=limits
            ) as ok:
                if not 200 <= ok.status < 300:
                    raise by_status(ok.status, "destination")
        except Refused as error:
            raise Fatal(f"destination: {error}", code=error.code) from None
        except EgressError as error:
            raise Retry(None, f"destination: {error}", code=error.code) from None

    def _check(self, size: int, room: Room) -> None:
        if size > self.settings.source_bytes_max:
            raise Fatal(
                f"the source has {size} bytes; this worker takes {self.settings.source_bytes_max}",
                code="source_too_large",
            )
        room(size, 0)

    async def _write(
        self, file: Path, pieces: AsyncIterable[Any], size: int, room: Room, told: Told
    ) -> int:
        written = 0
        with file.open("wb") as out:
            async for piece in pieces:
                written += len(piece)
                if written > self.settings.source_bytes_max:
                    raise Fatal(
                        f"the source goes on after {self.settings.source_bytes_max} bytes",
                        code="source_too_large",
                    )
                if not size:
                    room(written, written)  # nobody said how much will come
                await _write_piece(out, memoryview(piece))
                await told(written, size)
        if size and written != size:
            words = f"the source ended after {written} of {size} bytes"
            raise Retry(None, words, code="disconnected")
        return written


def _signed_in(url: str) -> tuple[str, list[tuple[str, str]]]:
    """A URL without its user, and the header that tells the server of that user (Basic)."""
    parts = urlsplit(url)
    user, found, host = parts.netloc.rpartition("@")
    if not found:
        return url, []
    code = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), [("Authorization", f"Basic {code}")]


def _attributes(place: Place, kind: str) -> Any:
    # A local folder keeps no attributes and says so by an error.
    return None if urlsplit(place.url).scheme == "file" else {"Content-Type": kind}


def _fence_of(path: object, prefix: str) -> int:
    word = str(path).removeprefix(prefix).partition("/")[0]
    number = word.removeprefix("v")
    return int(number) if word.startswith("v") and number.isdigit() else 2**63


async def _write_piece(out: IO[bytes], piece: memoryview) -> None:
    try:
        await asyncio.to_thread(out.write, piece)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Retry(60.0, "this worker's disk is full", code="disk_full") from None
        raise


def _size(file: Path) -> int:
    return file.stat().st_size


async def _pieces(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as source:
        while piece := await asyncio.to_thread(source.read, _PIECE_BYTES):
            yield piece
