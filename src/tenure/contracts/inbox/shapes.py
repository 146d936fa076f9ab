"""The JSON shapes of the contract's HTTP side: what a requester sends, and how a job is shown."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tenure.core.job import JobRecord
from tenure.core.transcode import OUTPUTS_MAX, Output, Place, StorageCredentials

URL_CHARS_MAX = 2_048
ATTEMPTS_MAX = 100

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

    `source` and `destination` say where, `outputs` what to make of it. `credentials` are
    short-lived and scoped, or signed URLs; they are stored encrypted, and so is what a source URL
    holds besides its address (user, password, query). `refresh_url` is asked for newer ones,
    `status_webhook_url` is told of every change. Both calls are signed: neither address has a user
    or a query, and the requester needs a webhook secret.
    """

    source: Place
    outputs: Annotated[list[Output], Meta(min_length=1, max_length=OUTPUTS_MAX)]
    destination: Place = Place()
    credentials: StorageCredentials | None = None
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
    status: Status
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

    job_id: JobId
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
        status=cast("Status", record.state),
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
