"""Errors as RFC 9457 problem documents.

`code` is for programs, `detail` for people, `type` links to the entry in /docs.
"""

from __future__ import annotations

import math
from http.client import responses
from typing import Any

import msgspec

from tenure.core.errors import (
    Conflict,
    NotFound,
    NotReplicated,
    QueueFull,
    ServerError,
    StoreError,
    TenureError,
    UsageError,
)

MEDIA = b"application/problem+json"
_STORE_RETRY_S = 2

# Each code with its status and its text in /docs.
CODES: dict[str, tuple[int, str]] = {
    "bad_http": (400, "The request is not HTTP/1.1."),
    "bad_json": (400, "The body is not JSON."),
    "bad_number": (400, "A number in the request does not fit in 64 bits."),
    "too_deep": (400, "JSON nested deeper than 128 levels is refused."),
    "bad_cursor": (
        400,
        "A position (Last-Event-ID, last_event_id, after) does not belong to this list or stream.",
    ),
    "bad_idempotency_key": (400, "Idempotency-Key has 1 to 255 printable characters."),
    "no_key": (401, "An API key is needed: Authorization: Bearer tn_..."),
    "bad_key": (401, "The API key or the ticket is unknown, used up, expired or revoked."),
    "scope": (403, "The API key does not have the scope that this operation needs."),
    "cross_site": (403, "The request comes from a page of another site."),
    "not_found": (404, "There is no such job, queue or page, or it is not yours."),
    "method": (405, "The path does not have this method; Allow says which it has."),
    "body_timeout": (408, "The body did not arrive in time."),
    "head_timeout": (408, "The head of the request did not arrive in time."),
    "conflict": (
        409,
        "The stored state forbids it, or the Idempotency-Key was used for another request.",
    ),
    "gone": (410, "The job has ended, and was removed after the time for which jobs are kept."),
    "too_large": (413, "The body is larger than the limit."),
    "url_too_long": (414, "The URL is longer than 8192 bytes."),
    "media_type": (415, "The body has to be application/json."),
    "invalid": (422, "The request is well formed but cannot be accepted; detail says why."),
    "no_webhook_secret": (422, "The request names an address to call, and you have no secret yet."),
    "nul": (422, "Strings with NUL characters are refused."),
    "queue_full": (429, "The queue is at its limit: try again after Retry-After seconds."),
    "rate_limited": (429, "This key makes too many requests: try again after Retry-After seconds."),
    "login_limited": (429, "Too many wrong keys: try again after Retry-After seconds."),
    "too_many_searches": (429, "This key runs too many searches: wait for their answers."),
    "too_many_streams": (429, "This key has too many event streams open."),
    "head_too_large": (431, "The head of the request is larger than the limit."),
    "internal": (500, "An error of the gateway; its log has details under this request id."),
    "store_away": (503, "The store cannot be reached: try again after Retry-After seconds."),
    "store_refused": (503, "The store answered with an error; the log of the gateway has it."),
    "not_replicated": (
        503,
        "Stored, but on fewer replicas than asked for: send it again under the same key.",
    ),
    "too_many_connections": (503, "The gateway has no room for another connection."),
    "busy": (
        503,
        "Too many large jobs or bodies wait: try again after Retry-After seconds.",
    ),
    "draining": (503, "This gateway is shutting down: try again, another one will answer."),
}


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True):
    """An error (RFC 9457). `code` is for programs, `detail` for people."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str


class Problem(Exception):
    """An error with its HTTP response. `code` is one of `CODES`; `extra` adds members."""

    def __init__(
        self,
        code: str,
        detail: str = "",
        *,
        headers: tuple[tuple[str, str], ...] = (),
        retry_after_s: int = 0,
        **extra: Any,
    ) -> None:
        status, text = CODES[code]
        super().__init__(detail or text)
        self.code = code
        self.status = status
        self.detail = detail or text
        self.headers = headers
        self.extra = extra
        if retry_after_s:
            self.headers = (*headers, ("retry-after", str(retry_after_s)))
            self.extra = {**extra, "retry_after": retry_after_s}

    def body(self, path: str, request_id: str, base: str = "") -> bytes:
        """The problem document; `base` is the prefix under which the gateway is served."""
        document = ProblemDocument(
            type=f"{base}/docs#{self.code}",
            title=title_of(self.status),
            status=self.status,
            detail=self.detail,
            instance=path,
            code=self.code,
            request_id=request_id,
        )
        return msgspec.json.encode(msgspec.structs.asdict(document) | self.extra)


def title_of(status: int) -> str:
    """The name of a status in RFC 9110; Python before 3.13 has older names for two."""
    newer = {413: "Content Too Large", 422: "Unprocessable Content"}
    return newer.get(status) or responses.get(status, "Error")


def problem_of(error: Exception) -> Problem | None:
    """The problem of an error of Tenure; None for an unexpected exception."""
    match error:
        case Problem():
            return error
        case QueueFull():
            retry_after_s = max(1, math.ceil(error.retry_after_ms / 1000))
            return Problem("queue_full", str(error), retry_after_s=retry_after_s)
        case NotFound():
            return Problem("not_found", str(error))
        case Conflict():
            return Problem("conflict", str(error))
        case UsageError():
            code = error.code if error.code in CODES else "invalid"
            wait_s = 1 if CODES[code][0] in (429, 503) else 0
            return Problem(code, str(error), retry_after_s=wait_s, **_member("field", error.reply))
        case NotReplicated():
            return Problem("not_replicated", retry_after_s=_STORE_RETRY_S)
        case ServerError():
            # The store's message is only logged, except `named`, which names a key of the queue.
            return Problem("store_refused", error.named, retry_after_s=_STORE_RETRY_S)
        case StoreError():
            # The store's message may name hosts, so it is logged and not sent.
            return Problem("store_away", retry_after_s=_STORE_RETRY_S)
        case TenureError():
            return Problem("conflict", str(error))
    return None


def _member(name: str, value: object) -> dict[str, Any]:
    return {name: value} if isinstance(value, str) and value else {}
