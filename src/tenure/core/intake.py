"""What endpoints that take jobs share: headers that they read, and answers for refused jobs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

from msgspec import Meta

from tenure.core.endpoint import Refused
from tenure.core.errors import Conflict, InvalidJob, QueueFull, UsageError
from tenure.core.idempotency import check_key
from tenure.core.job import NewJob, Submitted

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

IdempotencyKey = Annotated[
    str,
    Meta(
        pattern=r"^[!-~]([ -~]{0,253}[!-~])?$",
        description="The same key and request answer with the same job, another is a conflict.",
    ),
]
TraceParent = Annotated[
    str, Meta(description="W3C trace context, handed to the worker with the job.")
]


class Submits(Protocol):
    """What such endpoints need of the queue."""

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs, or say why not."""


def idempotency_key(headers: Mapping[str, str]) -> str:
    """The caller's key, "" for none."""
    key = headers.get("idempotency-key")
    if key is None:
        return ""
    try:
        check_key(key)
    except UsageError as error:
        raise Refused("bad_idempotency_key", str(error)) from None
    return key


def trace_context(headers: Mapping[str, str]) -> str:
    """The trace context if it is one; a malformed header is ignored, as its standard says."""
    trace = headers.get("traceparent", "")
    return trace if _TRACEPARENT.fullmatch(trace) else ""


def check_stored(submitted: Submitted) -> None:
    """Raise what the caller shall hear of a job that is not in the store."""
    match submitted.status:
        case "conflict":
            raise Conflict(submitted.reason)
        case "full":
            raise QueueFull(submitted.reason, retry_after_ms=submitted.retry_after_ms or 1000)
        case "invalid":
            raise InvalidJob(submitted.reason)
