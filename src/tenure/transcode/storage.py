"""Object storage by obstore: S3, GCS, Azure, or a local folder, as the job's URL says.

Credentials are handed over by a callback and only the job's own are used: this machine's (its
environment, its metadata service) are for nobody else. All connections go through the guarded
proxy. What storage answers is told by its status and code; its words may quote what we sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore.exceptions import (
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from tenure.core.outcome import Fatal, Retry
from tenure.egress import EgressError, Refused, read_target
from tenure.transcode.access import AccessDenied
from tenure.transcode.request import Place

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired"})
_PASSING = frozenset({408, 409, 423, 425, 429})
_RETRIES: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}


@dataclass(frozen=True, slots=True)
class Opened:
    """A store, and the key (or prefix) within it that the URL named."""

    store: Any
    key: str

    def at(self, more: str) -> str:
        """A key below the prefix."""
        return f"{self.key.rstrip('/')}/{more}" if self.key else more


def open_store(
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
            read_target(place.endpoint)  # the storage client ends the worker's thread over file://
        except Refused as error:
            words = f"an endpoint is an http or https URL with a host: {error}"
            raise Fatal(words, code="address_refused") from None
    parts = urlsplit(place.url)
    key = unquote(parts.path).lstrip("/")
    client: Any = {
        "proxy_url": proxy_url,
        "allow_http": True,  # the guard decides: plain http only where the allow list says so
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
        words = "a place is s3://bucket/key, gs://bucket/key, az://container/key or https://"
        raise Fatal(words, code="bad_request")
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
        # Always said, so that no AWS_* variable of this machine can lead elsewhere.
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
        words = 'an az:// place says its storage account in "account"'
        raise Fatal(words, code="bad_request")
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
    asked, allowed = Path(unquote(path)).resolve(), root.resolve()
    if not asked.is_relative_to(allowed):
        words = "this file:// place is outside the permitted folder"
        raise Fatal(words, code="address_refused")
    return Opened(LocalStore(allowed), str(asked.relative_to(allowed)))


STORAGE_ERRORS = (BaseError, FileNotFoundError)
"""What obstore raises; a missing object is a built-in error in its newer versions."""


def failure_of(error: Exception, what: str, proxy: EgressError | None) -> Exception:
    """What an error of the storage client asks for; none of its words are kept.

    `proxy` is why the way out was closed, if it was: the client then has a status of our proxy.
    """
    text = str(error)
    if isinstance(error, NotFoundError | FileNotFoundError):
        return by_status(404, what)
    code, found = _CODE.search(text), _STATUS.search(text)
    word, status = code[1] if code else "", int(found[1]) if found else 0
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or word in _EXPIRED:
        return by_status(status if status in (401, 403) else 403, what, word)
    if isinstance(proxy, Refused):
        return Fatal(f"{what}: {proxy}", code=proxy.code)
    if proxy is not None:
        return Retry(None, f"{what}: {proxy}", code=proxy.code)
    if not status:
        return Retry(None, f"{what}: storage does not answer", code="unreachable")
    return by_status(status, what, word)


def by_status(status: int, what: str, word: str = "") -> Exception:
    """What an HTTP status asks for, from a storage client and of a signed URL alike."""
    said, code = f"{status} {word}".strip(), f"http_{status}"
    if status in (401, 403):
        return AccessDenied(f"{what}: storage refuses the credentials ({said})")
    if status == 404:
        return Fatal(f"{what}: there is no such object or bucket", code=code)
    if status in _PASSING or status >= 500:
        return Retry(None, f"{what}: storage answered {said}", code=code)
    return Fatal(f"{what}: storage answered {said}", code=code)
