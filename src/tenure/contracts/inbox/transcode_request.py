"""The JSON bodies of the HTTP API, and the validation of a transcode request.

Secrets are moved to the sealed columns, so that the payload is safe to store, show and log. Secrets
are credentials, and everything in a source URL but the address. No error quotes a value of the
request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, cast
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tenure.core.endpoint import Refused
from tenure.core.errors import TenureError
from tenure.core.job import JobRecord
from tenure.core.portable import State, state_of
from tenure.core.transcode import (
    OUTPUTS_MAX,
    Output,
    Place,
    StorageCredentials,
    StorageKeys,
    Transcode,
)

_URL_CHARS_MAX = 2_048
_ATTEMPTS_MAX = 100

_CheckUrl = Callable[[str], object]
_WEB = ("https", "http")
_BUCKETS = ("s3", "gs", "az")
_PLACES = "s3://bucket/key, gs://bucket/key, az://container/key"

_Status = Literal[
    "queued",
    "claimed",
    "fetching",
    "processing",
    "uploading",
    "succeeded",
    "failed",
    "dead_letter",
]
_Url = Annotated[str, Meta(min_length=1, max_length=_URL_CHARS_MAX)]
_JobId = Annotated[str, Meta(min_length=1, max_length=128, description="The job's id.")]
_Attempts = Annotated[
    int, Meta(ge=1, le=_ATTEMPTS_MAX, description="How often the job may be started.")
]


class CreateTranscode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A transcode to be done.

    `source` and `destination` are URLs, `outputs` says what to make of the source. `credentials`
    are short-lived and scoped, or signed URLs. They are stored encrypted, and so is what a source
    URL holds besides its address (user, password, query). A worker gets newer credentials from
    `refresh_url` and reports every change to `status_webhook_url`. Both calls are signed: neither
    address has a user or a query, and the requester needs a webhook secret.
    """

    source: Place
    outputs: Annotated[list[Output], Meta(min_length=1, max_length=OUTPUTS_MAX)]
    destination: Place = Place()
    credentials: StorageCredentials | None = None
    status_webhook_url: _Url | None = None
    refresh_url: _Url | None = None
    max_attempts: _Attempts | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The job is stored."""

    job_id: str
    status: _Status = "queued"


class AskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Which job."""

    job_id: _JobId


class TranscodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its requester sees it; times are Unix milliseconds, 0 where there is none yet."""

    job_id: str
    status: _Status
    state: State
    attempt_count: int
    max_attempts: int
    created_ms: int
    updated_ms: int
    due_ms: int = 0
    credential_version: int = 0
    progress: Any | UnsetType = UNSET
    outputs: Any | UnsetType = UNSET
    error: Any | UnsetType = UNSET


class NewCredentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Newer credentials of an unfinished job; `credential_version` is the one they replace.

    They replace all that is sealed, a signed source URL included: bring that too.
    """

    job_id: _JobId
    credentials: StorageCredentials
    credential_version: Annotated[int, Meta(ge=0)]


class CredentialsView(msgspec.Struct, frozen=True, kw_only=True):
    """The version that is stored now."""

    job_id: str
    credential_version: int


class SecretView(msgspec.Struct, frozen=True, kw_only=True):
    """A new webhook secret; it cannot be shown again."""

    secret: str


def view(record: JobRecord) -> TranscodeView:
    """A stored job as its requester sees it."""
    return TranscodeView(
        job_id=record.job_id,
        status=cast("_Status", record.state),
        state=state_of(record),
        attempt_count=record.attempt,
        max_attempts=record.max_attempts,
        created_ms=record.created_ms,
        updated_ms=record.updated_ms,
        due_ms=record.due_ms,
        credential_version=record.extra.get("credential_version", 0),
        progress=_raw(record.progress),
        outputs=_raw(record.result),
        error=_raw(record.error),
    )


def _raw(text: bytes) -> Any:
    return msgspec.Raw(text) if text else UNSET


def validate(
    request: CreateTranscode, check: _CheckUrl, *, files: bool = True
) -> tuple[Transcode, StorageCredentials]:
    """The job without its secrets, and the secrets; raises `Refused` with the field's name.

    Without `files`, `file://` URLs are refused: no worker reads or writes its own machine.
    """
    given = request.credentials or StorageCredentials()
    check_credentials(given, check)
    names = [output.name for output in request.outputs]
    if len(set(names)) != len(names):
        raise _wrong("outputs", "each output has a name of its own")
    for side, place in (("source", request.source), ("destination", request.destination)):
        if not files and place.url.strip().lower().startswith("file:"):
            raise _wrong(f"{side}.url", f"{_PLACES}; file:// is not permitted (transcode.files)")
        if place.endpoint:  # stored in plain text
            _check_bare(f"{side}.endpoint", place.endpoint, "; keys belong in `credentials`", check)
    source, keys = _source(request.source, given.source, check)
    destination, more = _destination(request.destination, given.destination, request.outputs)
    job = Transcode(source=source, destination=destination, outputs=request.outputs)
    return job, StorageCredentials(source=keys, destination=more)


def check_credentials(given: StorageCredentials, check: _CheckUrl) -> None:
    """Refuse credentials that cannot be used."""
    for side, keys in (("source", given.source), ("destination", given.destination)):
        at = f"credentials.{side}"
        if bool(keys.access_key_id) != bool(keys.secret_access_key):
            missing = "secret_access_key" if keys.access_key_id else "access_key_id"
            raise _wrong(f"{at}.{missing}", "an access key has an id and a secret")
        if keys.session_token and not keys.access_key_id:
            raise _wrong(f"{at}.access_key_id", "a session token belongs to an access key")
        urls = {"signed_url": keys.signed_url} if keys.signed_url else {}
        urls |= {f"signed_urls.{name}": url for name, url in keys.signed_urls.items()}
        for name, url in urls.items():
            _check_web(f"{at}.{name}", _split(f"{at}.{name}", url), url, check)
    if given.source.signed_urls:
        raise _wrong("credentials.source.signed_urls", "a source has one signed_url")
    if given.destination.signed_url:
        raise _wrong(
            "credentials.destination.signed_url",
            "a destination has signed_urls, an object of URLs by the names of the outputs",
        )


def check_called(field: str, url: str | None, check: _CheckUrl) -> str | None:
    """Check an address that a worker calls. It is stored in plain text, so it holds no secret."""
    if url is not None:
        _check_bare(field, url, "; calls are signed, and their body names the job", check)
    return url


def _wrong(field: str, right: str) -> Refused:
    """The refusal of one field; `right` says what is valid."""
    return Refused("invalid", f"{field}: {right}", field=field)


def _source(place: Place, keys: StorageKeys, check: _CheckUrl) -> tuple[Place, StorageKeys]:
    if not place.url:
        if not keys.signed_url:
            raise _wrong("source.url", f"{_PLACES}, https:// or file://, or a signed_url")
        return place, keys
    parts = _split("source.url", place.url)
    if parts.scheme not in _WEB:
        return _in_bucket("source", place, keys, parts, key_needed=True)
    _check_web("source.url", parts, place.url, check)
    given = parts.scheme + place.url[len(parts.scheme) :]  # HTTPS:// is https:// from here on
    address = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    place = msgspec.structs.replace(place, url=address)
    if address == given:
        return place, keys
    if keys.signed_url:
        raise _wrong("source.url", "an address alone where credentials.source has a signed_url")
    return place, msgspec.structs.replace(keys, signed_url=given)


def _destination(
    place: Place, keys: StorageKeys, outputs: list[Output]
) -> tuple[Place, StorageKeys]:
    names = [output.name for output in outputs]
    for name in keys.signed_urls:
        if name not in names:
            raise _wrong(f"credentials.destination.signed_urls.{name}", "a name of an output")
    if place.url:
        parts = _split("destination.url", place.url)
        return _in_bucket("destination", place, keys, parts, key_needed=False)
    for name in names:
        if name not in keys.signed_urls:
            raise _wrong(
                "destination.url",
                f"{_PLACES} or file://, or a URL for each output in "
                f"credentials.destination.signed_urls; {name} has none",
            )
    return place, keys


def _in_bucket(
    side: str,
    place: Place,
    keys: StorageKeys,
    parts: SplitResult,
    *,
    key_needed: bool,
) -> tuple[Place, StorageKeys]:
    field = f"{side}.url"
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/") or parts.query or parts.fragment:
            raise _wrong(field, "file:///folder/file, without host, query and fragment")
        return place, keys
    if parts.scheme not in _BUCKETS or parts.query or parts.fragment:
        https = " or https://" if side == "source" else "; signed URLs are credentials"
        raise _wrong(field, f"{_PLACES}{https}; no query and no fragment")
    bucket = parts.netloc.rpartition("@")[2]
    if not bucket or (key_needed and not parts.path.strip("/")):
        raise _wrong(field, _PLACES)
    if parts.scheme == "az" and not place.account:
        raise _wrong(f"{side}.account", "the storage account of an az:// place")
    if "@" in parts.netloc:
        if parts.scheme != "s3" or not parts.username or not parts.password:
            raise _wrong(field, "a URL without a user; secrets belong in `credentials`")
        if keys.access_key_id:
            raise _wrong(field, "a URL without a user where `credentials` has an access key")
        keys = msgspec.structs.replace(
            keys,
            access_key_id=unquote(parts.username),
            secret_access_key=unquote(parts.password),
        )
        place = msgspec.structs.replace(place, url=f"s3://{bucket}{parts.path}")
    return place, keys


def _check_bare(field: str, url: str, why: str, check: _CheckUrl) -> None:
    parts = _split(field, url)
    if parts.scheme not in _WEB or not parts.hostname:
        raise _wrong(field, "an http or https URL with a host")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise _wrong(field, f"a URL without user, query and fragment{why}")
    _permitted(field, url, check)


def _check_web(field: str, parts: SplitResult, url: str, check: _CheckUrl) -> None:
    if parts.scheme not in _WEB or not parts.hostname or parts.fragment:
        raise _wrong(field, "an http or https URL with a host and without a fragment")
    _permitted(field, urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])), check)


def _permitted(field: str, url: str, check: _CheckUrl) -> None:
    try:
        check(url)
    except TenureError as refused:
        raise _wrong(field, str(refused)) from None


def _split(field: str, url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        readable = url.isprintable() and " " not in url and parts.port != 0
    except ValueError:
        readable = False
    if not readable:
        raise _wrong(field, "a URL: scheme://host/path, without spaces and control characters")
    return parts
