"""The JSON shapes of the contract's HTTP side: what a requester sends, and how a job is shown."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, UnsetType

from leasehold.core.errors import InvalidJob
from leasehold.core.job import JobRecord

URL_CHARS_MAX = 2_048
ATTEMPTS_MAX = 100
OUTPUTS_MAX = 16

Status = Literal[
    "queued",
    "claimed",
    "fetching",
    "processing",
    "uploading",
    "succeeded",
    "failed",
    "dead_letter",
]
Url = Annotated[str, Meta(min_length=1, max_length=URL_CHARS_MAX)]
JobId = Annotated[str, Meta(min_length=1, max_length=128, description="The job's id.")]
Attempts = Annotated[
    int, Meta(ge=1, le=ATTEMPTS_MAX, description="How often the job may be started.")
]


class CreateTranscode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A transcode to be done.

    `source` and `destination` say where (routing, no secrets), `outputs` what to make of it.
    `credentials` are short-lived and scoped, or signed URLs; they are stored encrypted.
    `refresh_url` is asked for newer ones, `status_webhook_url` is told of every change.
    """

    source: dict[str, Any]
    outputs: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=OUTPUTS_MAX)]
    destination: dict[str, Any] = {}
    credentials: dict[str, Any] | None = None
    status_webhook_url: Url | None = None
    refresh_url: Url | None = None
    max_attempts: Attempts | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The job is stored."""

    job_id: str
    status: Status = "queued"


class AskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Which job."""

    job_id: JobId


class TranscodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its requester sees it; times are Unix milliseconds, 0 where there is none yet."""

    job_id: str
    status: str
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
    """Newer credentials of an unfinished job; `credential_version` is the one they replace."""

    job_id: JobId
    credentials: dict[str, Any]
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
        status=record.state,
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


def check_url(name: str, url: str | None) -> str | None:
    """Refuse what no worker would call; who may be reached is decided when it is."""
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        named = False
    plain = named and url.isprintable() and not parts.username
    if not plain or parts.scheme not in ("https", "http"):
        raise InvalidJob(f"{name}: an http or https URL with a host and without a user in it")
    return url


def _raw(text: bytes) -> Any:
    return msgspec.Raw(text) if text else UNSET
