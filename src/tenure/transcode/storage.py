"""Transfers between object storage or HTTP and the attempt's folder, with the job's credentials."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import re
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec
import obstore
from obstore.exceptions import (
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from tenure.core.errors import TenureError
from tenure.core.lease import Lease
from tenure.core.outcome import Fatal, Retry
from tenure.core.transcode import Place, Transcode
from tenure.egress import (
    Client,
    EgressError,
    GuardedProxy,
    Limits,
    RequestRefused,
    TooLarge,
    read_target,
)
from tenure.egress.client import Body
from tenure.vault import CredentialStore, StoredCredentials, Vault

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_JOB_ID = re.compile(r"[A-Za-z0-9_@:-][A-Za-z0-9_.@:-]{0,127}")


def read_request(payload: Any) -> Transcode:
    """The payload as its type; `Fatal` if it does not fit, since a retry cannot succeed."""
    try:
        return msgspec.convert(payload, Transcode)
    except msgspec.ValidationError as error:
        raise Fatal(f"the payload is no transcode job: {error}", code="bad_request") from None


def output_key(job_id: str, fence: int, name: str) -> str:
    """The key below the destination; the claim's version keeps a stale worker from overwriting it.

    >>> output_key("01J9", 3, "720p.mp4")
    '01J9/v3/720p.mp4'
    """
    if not _JOB_ID.fullmatch(job_id):
        raise Fatal(f"{job_id[:130]!r} cannot be part of a storage key", code="bad_request")
    return f"{job_id}/v{fence}/{name}"


GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodeSettings:
    """Limits and folders.

    An output of a source over `doubling_from_bytes` may be at most twice its size: the 200 % rule
    of the inbox contract, section 11. Outputs of smaller sources may have `output_bytes_max`.
    `local_root` is the only folder for `file://` sources and outputs; None permits none. At most
    `parallel` ffmpegs run at once, however many attempts a worker holds; those of one requester
    leave one place to others.
    ffmpeg does not run without the `required` parts of the cage (network, files, syscalls).
    `readable` are further paths that it may read, such as unusual library folders.
    """

    work_folder: Path = field(
        default_factory=lambda: Path(tempfile.gettempdir()) / f"tenure-{os.geteuid()}"
    )
    source_bytes_max: int = 20 * GIB
    output_bytes_max: int = 4 * GIB
    doubling_from_bytes: int = 10**9
    disk_reserve_bytes: int = GIB // 4
    memory_bytes_max: int = 4 * GIB
    cpu_s_max: int = 4 * 3600
    wall_s_max: float = 4 * 3600.0
    threads: int = 2
    threads_max: int = 1024
    parallel: int = field(default_factory=lambda: os.cpu_count() or 1)
    transfer_s_max: float = 3600.0
    report_every_s: float = 1.0
    local_root: Path | None = None
    ffmpeg: Path | None = None
    required: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()

    def output_cap_bytes(self, source_bytes: int) -> int:
        """The largest permitted size of an output of this source."""
        if source_bytes > self.doubling_from_bytes:
            return 2 * source_bytes
        return self.output_bytes_max

    def disk_needed_bytes(self, source_bytes: int, outputs: int) -> int:
        """The disk space needed before work begins: the copy, and outputs of twice its size."""
        return source_bytes * (1 + 2 * outputs) + self.disk_reserve_bytes


Answer = TypeVar("Answer")
Refresh = Callable[[Lease, int], Awaitable[StoredCredentials]]
"""Returns credentials newer than the refused version; see `tenure.webhooks.refresh`."""


class AccessDenied(TenureError):
    """Storage answered 401 or 403, or the token has expired."""

    code = "access_denied"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Decrypted credentials for the source and for the destination."""

    version: int
    source: Mapping[str, Any] = field(repr=False)
    destination: Mapping[str, Any] = field(repr=False)


class Access:
    """The credentials of one attempt, refreshed when storage refuses them."""

    def __init__(
        self, lease: Lease, store: CredentialStore, vault: Vault, refresh: Refresh
    ) -> None:
        self._lease = lease
        self._store = store
        self._vault = vault
        self._refresh = refresh
        self._opened: Credentials | None = None

    async def use(self, action: Callable[[Credentials], Awaitable[Answer]]) -> Answer:
        """Run `action`; if storage refuses the credentials, refresh them and run it again.

        The refresher ends the job at its own limit, so this loop ends too.
        """
        if self._opened is None:
            self._opened = await self._open(await self._store.read(self._lease))
        while True:
            try:
                return await action(self._opened)
            except AccessDenied:
                stored = await self._refresh(self._lease, self._opened.version)
                self._opened = await self._open(stored)

    async def _open(self, stored: StoredCredentials) -> Credentials:
        if stored.sealed is None:
            return Credentials(stored.version, {}, {})
        plain = await self._vault.open(stored.sealed, stored.binding)
        try:
            sides = msgspec.json.decode(plain.reveal(), type=dict[str, dict[str, Any]])
        except msgspec.MsgspecError:
            # The decoder's message would quote the credentials.
            raise Fatal(
                'the credentials are no object with "source" and "destination" objects',
                code="bad_credentials",
            ) from None
        return Credentials(stored.version, sides.get("source", {}), sides.get("destination", {}))


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired"})
_TRANSIENT = frozenset({408, 409, 423, 425, 429})
_RETRIES: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}


@dataclass(frozen=True, slots=True)
class Opened:
    """A store, and the key (or prefix) of the URL within it."""

    store: Any
    key: str

    def at(self, more: str) -> str:
        """A key below the prefix."""
        return f"{self.key.rstrip('/')}/{more}" if self.key else more


def _open_store(
    place: Place,
    credentials: Mapping[str, Any],
    *,
    proxy_url: str,
    local_root: Path | None,
    transfer_s_max: float,
) -> Opened:
    """The store that a URL names."""
    if place.endpoint:
        try:
            read_target(place.endpoint)  # file:// would crash the storage client's thread
        except RequestRefused as error:
            reason = f"an endpoint is an http or https URL with a host: {error}"
            raise Fatal(reason, code="address_refused") from None
    if any(_CONTROL.search(str(value)) for value in credentials.values()):
        # The storage client would panic: they become headers.
        raise Fatal("the credentials hold a control character", code="bad_credentials")
    parts = urlsplit(place.url)
    key = unquote(parts.path).lstrip("/")
    client: Any = {
        "proxy_url": proxy_url,
        "allow_http": True,  # the guard permits plain http only to hosts of the allow list
        "connect_timeout": timedelta(seconds=10),
        "timeout": timedelta(seconds=transfer_s_max),
    }
    makers: dict[str, Callable[[], Any]] = {
        "s3": lambda: _s3(parts.netloc, place, credentials, client),
        "gs": lambda: _gcs(parts.netloc, place, credentials, client),
        "az": lambda: _azure(parts.netloc, place, credentials, client),
    }
    if parts.scheme == "file":
        return _local(parts.path, local_root)
    if parts.scheme not in makers or not parts.netloc or parts.query or parts.fragment:
        reason = "a place is s3://bucket/key, gs://bucket/key, az://container/key or https://"
        raise Fatal(reason, code="bad_request")
    try:
        return Opened(makers[parts.scheme](), key)
    except (BaseError, ValueError, TypeError) as error:
        raise Fatal(
            f"{parts.scheme}://{parts.netloc} cannot be opened ({type(error).__name__})",
            code="bad_request",
        ) from None


def _s3(bucket: str, place: Place, given: Mapping[str, Any], client: Any) -> Any:
    region = place.region or "us-east-1"
    signed = "access_key_id" in given and "secret_access_key" in given
    config: Any = {
        "region": region,
        # Always set, so that no AWS_* variable of this machine can change it.
        "endpoint": place.endpoint or f"https://s3.{region}.amazonaws.com",
        "virtual_hosted_style_request": False,
        "skip_signature": not signed,
    }

    def provide() -> Any:
        return {
            "access_key_id": str(given["access_key_id"]),
            "secret_access_key": str(given["secret_access_key"]),
            "token": str(given["session_token"]) if given.get("session_token") else None,
            "expires_at": None,
        }

    provider = provide if signed else None
    return S3Store(
        bucket,
        config=config,
        client_options=client,
        retry_config=_RETRIES,
        credential_provider=provider,
    )


def _gcs(bucket: str, place: Place, given: Mapping[str, Any], client: Any) -> Any:
    signed = "token" in given
    config: Any = {
        "base_url": place.endpoint or "https://storage.googleapis.com",
        "skip_signature": not signed,
    }

    def provide() -> Any:
        return {"token": str(given["token"]), "expires_at": None}

    return GCSStore(
        bucket,
        config=config,
        client_options=client,
        retry_config=_RETRIES,
        credential_provider=provide if signed else None,
    )


def _azure(container: str, place: Place, given: Mapping[str, Any], client: Any) -> Any:
    names = [name for name in ("sas_token", "access_key", "token") if name in given]
    if not place.account:
        reason = 'an az:// place names its storage account in "account"'
        raise Fatal(reason, code="bad_request")
    config: Any = {
        "account_name": place.account,
        "endpoint": place.endpoint or f"https://{place.account}.blob.core.windows.net",
        "skip_signature": not names,
    }

    def provide() -> Any:
        return {names[0]: str(given[names[0]]), "expires_at": None}

    return AzureStore(
        container,
        config=config,
        client_options=client,
        retry_config=_RETRIES,
        credential_provider=provide if names else None,
    )


def _local(path: str, root: Path | None) -> Opened:
    if root is None:
        raise Fatal("file:// places are not permitted by this worker", code="address_refused")
    target, allowed = Path(unquote(path)).resolve(), root.resolve()
    if not target.is_relative_to(allowed):
        reason = "this file:// place is outside the permitted folder"
        raise Fatal(reason, code="address_refused")
    return Opened(LocalStore(allowed), str(target.relative_to(allowed)))


_STORAGE_ERRORS = (BaseError, FileNotFoundError)
"""The errors of obstore; newer versions raise a built-in error for a missing object."""


def failure_of(error: Exception, what: str, proxy: EgressError | None) -> Exception:
    """The error to raise for an error of the storage client, whose message is dropped.

    `proxy` is the guard's reason for refusing the connection, if it did. The client then reports a
    status of our proxy.
    """
    text = str(error)
    if isinstance(error, NotFoundError | FileNotFoundError):
        return _by_status(404, what)
    code, found = _CODE.search(text), _STATUS.search(text)
    name, status = code[1] if code else "", int(found[1]) if found else 0
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or name in _EXPIRED:
        return _by_status(status if status in (401, 403) else 403, what, name)
    if isinstance(proxy, RequestRefused):
        return Fatal(f"{what}: {proxy}", code=proxy.code)
    if proxy is not None:
        return Retry(None, f"{what}: {proxy}", code=proxy.code)
    if not status:
        return Retry(None, f"{what}: storage does not answer", code="unreachable")
    return _by_status(status, what, name)


def _by_status(status: int, what: str, name: str = "") -> Exception:
    """The error to raise for an HTTP status, of a storage client or a signed URL."""
    text, code = f"{status} {name}".strip(), f"http_{status}"
    if status in (401, 403):
        return AccessDenied(f"{what}: storage refuses the credentials ({text})")
    if status == 404:
        return Fatal(f"{what}: there is no such object or bucket", code=code)
    if status in _TRANSIENT or status >= 500:
        return Retry(None, f"{what}: storage answered {text}", code=code)
    return Fatal(f"{what}: storage answered {text}", code=code)


_CHUNK_BYTES = 4 * 1024 * 1024

OnProgress = Callable[[int, int], Awaitable[None]]
"""Gets the bytes transferred so far and the total (0: unknown)."""
CheckRoom = Callable[[int, int], None]
"""Gets the size of a source and the bytes fetched; raises if the disk has no room for it now."""


@dataclass(frozen=True, slots=True)
class Mover:
    """Transfers files through the guarded client and the guarded proxy."""

    client: Client
    proxy: GuardedProxy
    settings: TranscodeSettings

    async def fetch(
        self,
        place: Place,
        credentials: Credentials,
        file: Path,
        *,
        check_room: CheckRoom,
        on_progress: OnProgress,
    ) -> int:
        """Copy the source to a file; returns its size."""
        signed = credentials.source.get("signed_url")
        url = signed if isinstance(signed, str) else place.url
        if urlsplit(url).scheme in ("https", "http"):
            return await self._fetch_url(url, file, check_room, on_progress)
        opened = self._open(place, credentials.source)
        try:
            answer = await obstore.get_async(opened.store, opened.key)
            size = int(answer.meta["size"])
            self._check(size, check_room)
            stream = answer.stream(min_chunk_size=_CHUNK_BYTES)
            return await self._write(file, stream, size, check_room, on_progress)
        except _STORAGE_ERRORS as error:
            raise failure_of(error, "source", self.proxy.failure) from None

    async def put(
        self, place: Place, credentials: Credentials, key: str, file: Path, kind: str
    ) -> str:
        """Copy a file to its destination; returns its key, without the host of a signed URL."""
        urls = credentials.destination.get("signed_urls")
        signed = urls.get(file.name) if isinstance(urls, dict) else None
        if isinstance(signed, str):
            await self._put_url(signed, file, kind)
            return key
        opened = self._open(place, credentials.destination)
        path = opened.at(key)
        try:
            await obstore.put_async(
                opened.store, path, file, attributes=_attributes(place, kind), max_concurrency=2
            )
        except _STORAGE_ERRORS as error:
            raise failure_of(error, "destination", self.proxy.failure) from None
        return path

    async def remove_older(
        self, place: Place, credentials: Credentials, job_id: str, fence: int
    ) -> None:
        """Remove outputs of earlier claims of this job, which can no longer be published.

        Credentials that may only write cannot list or delete. Then the outputs stay.
        """
        if "signed_urls" in credentials.destination or not place.url:
            return
        opened = self._open(place, credentials.destination)
        prefix = opened.at(job_id) + "/"
        try:
            async for batch in obstore.list(opened.store, prefix):
                old = [str(one["path"]) for one in batch if _fence_of(one["path"], prefix) < fence]
                if old:
                    await obstore.delete_async(opened.store, old)
        except _STORAGE_ERRORS:
            return

    async def remove(self, place: Place, credentials: Credentials, paths: list[str]) -> None:
        """Remove outputs of an attempt that failed, if the credentials permit it."""
        if "signed_urls" in credentials.destination or not paths:
            return
        try:
            await obstore.delete_async(self._open(place, credentials.destination).store, paths)
        except _STORAGE_ERRORS:
            return

    def _open(self, place: Place, credentials: Any) -> Opened:
        self.proxy.taken()
        return _open_store(
            place,
            credentials,
            proxy_url=self.proxy.url,
            local_root=self.settings.local_root,
            transfer_s_max=self.settings.transfer_s_max,
        )

    async def _fetch_url(
        self, url: str, file: Path, check_room: CheckRoom, on_progress: OnProgress
    ) -> int:
        limits = Limits(total_ms=round(self.settings.transfer_s_max * 1000))
        address, headers = _with_basic_auth(url)
        try:
            async with self.client.open("GET", address, headers=headers, limits=limits) as answer:
                if not 200 <= answer.status < 300:
                    raise _by_status(answer.status, "source")
                length = answer.headers.get("content-length", "")
                size = int(length) if length.isdigit() else 0
                self._check(size, check_room)
                return await self._write(file, answer.chunks, size, check_room, on_progress)
        except (RequestRefused, TooLarge) as error:
            raise Fatal(f"source: {error}", code=error.code) from None
        except EgressError as error:
            raise Retry(None, f"source: {error}", code=error.code) from None

    async def _put_url(self, url: str, file: Path, kind: str) -> None:
        body = Body(await asyncio.to_thread(_size, file), _chunks(file))
        limits = Limits(total_ms=round(self.settings.transfer_s_max * 1000))
        address, headers = _with_basic_auth(url)
        headers.append(("Content-Type", kind))
        try:
            async with self.client.open(
                "PUT", address, headers=headers, body=body, limits=limits
            ) as ok:
                if not 200 <= ok.status < 300:
                    raise _by_status(ok.status, "destination")
        except RequestRefused as error:
            raise Fatal(f"destination: {error}", code=error.code) from None
        except EgressError as error:
            raise Retry(None, f"destination: {error}", code=error.code) from None

    def _check(self, size: int, check_room: CheckRoom) -> None:
        if size > self.settings.source_bytes_max:
            raise Fatal(
                f"the source has {size} bytes; this worker takes {self.settings.source_bytes_max}",
                code="source_too_large",
            )
        check_room(size, 0)

    async def _write(
        self,
        file: Path,
        chunks: AsyncIterable[Any],
        size: int,
        check_room: CheckRoom,
        on_progress: OnProgress,
    ) -> int:
        written = 0
        with file.open("wb") as out:
            async for chunk in chunks:
                written += len(chunk)
                if written > self.settings.source_bytes_max:
                    raise Fatal(
                        f"the source goes on after {self.settings.source_bytes_max} bytes",
                        code="source_too_large",
                    )
                if not size:  # unknown: check as it grows
                    check_room(written, written)
                elif written > size:  # there may be no room for more
                    reason = f"the source goes on after the {size} bytes that it announced"
                    raise Fatal(reason, code="source_too_large")
                await _write_chunk(out, memoryview(chunk))
                self.proxy.taken()
                await on_progress(written, size)
        if size and written != size:
            reason = f"the source ended after {written} of {size} bytes"
            raise Retry(None, reason, code="disconnected")
        return written


def _with_basic_auth(url: str) -> tuple[str, list[tuple[str, str]]]:
    """A URL without user and password, and the Basic authorization header for them."""
    parts = urlsplit(url)
    user, found, host = parts.netloc.rpartition("@")
    if not found:
        return url, []
    code = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), [("Authorization", f"Basic {code}")]


def _attributes(place: Place, kind: str) -> Any:
    # A local folder cannot store attributes and would raise an error.
    return None if urlsplit(place.url).scheme == "file" else {"Content-Type": kind}


def _fence_of(path: object, prefix: str) -> int:
    folder = str(path).removeprefix(prefix).partition("/")[0]
    number = folder.removeprefix("v")
    return int(number) if folder.startswith("v") and number.isdigit() else 2**63


async def _write_chunk(out: IO[bytes], chunk: memoryview) -> None:
    try:
        await asyncio.to_thread(out.write, chunk)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Retry(60.0, "this worker's disk is full", code="disk_full") from None
        raise


def _size(file: Path) -> int:
    return file.stat().st_size


async def _chunks(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as source:
        while chunk := await asyncio.to_thread(source.read, _CHUNK_BYTES):
            yield chunk
