"""For receivers: is this delivery ours, fresh, and seen for the first time?

    verified = await verify(await request.body(), request.headers, [SECRET], nonces=nonces)

Give it the body as it came over the wire, before any parsing. Signatures are compared in constant
time and against all live secrets, so that a secret can be rotated without a gap. A nonce is
remembered for twice the permitted skew and a minute: remembered for less, a delivery stamped with
the last permitted future would outlive its nonce and could be played again.

An event may rightly come more than once (each time with a new nonce): do its effect and remember
`event_id` in one transaction. Answer 2xx to a repetition, 401 to what does not verify.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tenure.webhooks.replay import NonceStore
from tenure.webhooks.signing import (
    EVENT_ID,
    NONCE,
    NONCE_FORM,
    OTHER_SIGNATURE,
    SIGNATURE,
    TIMESTAMP,
    read_secret,
    signature,
)

Reason = Literal["headers", "timestamp", "signature", "event_id", "replay"]

SKEW_S = 300
_MARGIN_S = 60
_DIGITS_MAX = 12
_SIGNATURES_MAX = 8


class InvalidWebhook(Exception):
    """Do not act on this request. `reason` is one word for counting, the text is for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class Verified:
    """A genuine delivery. `event` is the decoded body; `event_id` is what to deduplicate by."""

    event_id: str
    timestamp_s: int
    nonce: str
    event: dict[str, Any]


async def verify(
    body: bytes,
    headers: Mapping[str, str],
    secrets: Sequence[str | bytes],
    *,
    nonces: NonceStore,
    skew_s: int = SKEW_S,
    now_s: float | None = None,
) -> Verified:
    """Check a delivery and take its nonce; raises `InvalidWebhook`."""
    now = time.time() if now_s is None else now_s
    verified = check(body, headers, secrets, skew_s=skew_s, now_s=now)
    # Last, so that only who knows the secret can fill the store.
    if not await nonces.take(verified.nonce, now_s=now, keep_s=2 * skew_s + _MARGIN_S):
        raise InvalidWebhook("replay", "this nonce was seen before")
    return verified


def check(
    body: bytes,
    headers: Mapping[str, str],
    secrets: Sequence[str | bytes],
    *,
    skew_s: int = SKEW_S,
    now_s: float,
) -> Verified:
    """All of `verify` but the nonce: pure, for receivers that keep nonces in their own way."""
    if not secrets:
        raise ValueError("give at least one secret")
    found = _headers(headers)
    timestamp, nonce, event_id = found[TIMESTAMP], found[NONCE], found[EVENT_ID]
    if abs(now_s - int(timestamp)) > skew_s:
        raise InvalidWebhook("timestamp", f"the timestamp is more than {skew_s} s away")
    given = f"{found[SIGNATURE]} {found.get(OTHER_SIGNATURE, '')}"
    if not _is_signed(given, [_key(one) for one in secrets], timestamp, nonce, body):
        raise InvalidWebhook("signature", "no signature fits the body and a live secret")
    event = _event(body)
    if event.get("event_id") != event_id:  # both are public: the signature has been checked
        raise InvalidWebhook("event_id", "the event id of the header is not that of the body")
    return Verified(event_id, int(timestamp), nonce, event)


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    lower = {name.lower(): value for name, value in headers.items()}
    missing = [name for name in (SIGNATURE, TIMESTAMP, NONCE, EVENT_ID) if not lower.get(name)]
    if missing:
        raise InvalidWebhook("headers", f"missing: {', '.join(missing)}")
    stamp = lower[TIMESTAMP]
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= _DIGITS_MAX):
        raise InvalidWebhook("headers", "the timestamp is not in seconds")
    if not NONCE_FORM.fullmatch(lower[NONCE]):
        raise InvalidWebhook("headers", "the nonce is not of our form")
    return lower


def _is_signed(given: str, keys: list[bytes], timestamp: str, nonce: str, body: bytes) -> bool:
    """Every given signature is compared with every expected one: no early way out."""
    offered = given.split()[:_SIGNATURES_MAX]
    fits = False
    for key in keys:
        expected = signature(key, timestamp, nonce, body).encode()
        for one in offered:
            fits |= hmac.compare_digest(expected, one.encode(errors="replace"))
    return fits


def _key(secret: str | bytes) -> bytes:
    return read_secret(secret) if isinstance(secret, str) else secret


def _event(body: bytes) -> dict[str, Any]:
    try:
        event = json.loads(body)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise InvalidWebhook("event_id", "the body is not a JSON object")
    return event
