"""Signatures of webhooks: HMAC-SHA256 over `timestamp.nonce.raw_body`, and their secrets.

The inbox contract fixes the names of its headers, `x-euterpe-*`; receivers rely on them. With
`standard`, the `webhook-*` headers of the Standard Webhooks specification are sent beside them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from tenure.core.errors import UsageError
from tenure.egress import Response
from tenure.store.batcher import CachedLookup
from tenure.vault import Secret


class WebhookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a job. `event_id` is the same at every delivery: do the effect once by it.

    `seq` counts 1, 2, 3 ... within the job. `outputs` come with `succeeded`, `error` with `failed`
    and `dead_letter`, `progress` where the handler reported some.
    """

    event_id: str
    job_id: str
    seq: int
    status: str
    previous_status: str
    task: str
    attempt: int
    max_attempts: int
    occurred_ms: int
    outputs: Any = msgspec.UNSET
    error: Any = msgspec.UNSET
    progress: Any = msgspec.UNSET


class WebhookHeaders(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What a delivery is verified by; see `tenure.webhooks.verify`."""

    x_euterpe_signature: str
    x_euterpe_timestamp: str
    x_euterpe_nonce: str
    x_euterpe_event_id: str


SIGNATURE = "x-euterpe-signature"
TIMESTAMP = "x-euterpe-timestamp"
NONCE = "x-euterpe-nonce"
EVENT_ID = "x-euterpe-event-id"
OTHER_SIGNATURE = "x-euterpe-signature-other"
HEADERS = (SIGNATURE, TIMESTAMP, NONCE, EVENT_ID)

_STANDARD_ID = "webhook-id"
_STANDARD_TIMESTAMP = "webhook-timestamp"
_STANDARD_SIGNATURE = "webhook-signature"

NONCE_FORM = re.compile(r"[A-Za-z0-9_-]{22,64}")
_SECRETS_MAX = 2
_SECRET_PREFIX = "whsec_"
_SECRET_BYTES_MIN = 24


def signature(secret: bytes, timestamp: str, nonce: str, body: bytes) -> str:
    """The signature as in the header, in hexadecimal.

    >>> signature(b"k" * 24, "1700000000", "n" * 22, b"{}")[:16]
    '241763caab3e6a1a'
    """
    text = f"{timestamp}.{nonce}.".encode() + body
    return hmac.digest(secret, text, hashlib.sha256).hex()


def _standard_signature(secret: bytes, event_id: str, timestamp: str, body: bytes) -> str:
    """The signature in the form of Standard Webhooks."""
    text = f"{event_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, text, hashlib.sha256)).decode()


def new_nonce() -> str:
    """A nonce of 192 random bits; it contains no dot."""
    return secrets.token_urlsafe(24)


def signed_headers(
    live: Sequence[bytes],
    *,
    event_id: str,
    body: bytes,
    now_s: int,
    nonce: str,
    standard: bool = False,
) -> list[tuple[str, str]]:
    """The headers of one attempt; the contract's signature is made with the first live secret."""
    timestamp = str(now_s)
    first, *others = [signature(secret, timestamp, nonce, body) for secret in live]
    headers = [(SIGNATURE, first), (TIMESTAMP, timestamp), (NONCE, nonce), (EVENT_ID, event_id)]
    headers += [(OTHER_SIGNATURE, other) for other in others]
    if standard:
        signatures = (_standard_signature(one, event_id, timestamp, body) for one in live)
        headers += [
            (_STANDARD_ID, event_id),
            (_STANDARD_TIMESTAMP, timestamp),
            (_STANDARD_SIGNATURE, " ".join(signatures)),
        ]
    return headers


def new_secret() -> str:
    """A new secret in the form that `read_secret` and other libraries accept."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def read_secret(text: str) -> bytes:
    """The bytes of a secret: `whsec_` with base64, or any text that is long enough.

    >>> read_secret("whsec_" + "QUJD" * 8)[:3]
    b'ABC'
    """
    try:
        coded = text.startswith(_SECRET_PREFIX)
        raw = _decoded(text[6:]) if coded else text.encode()
    except (binascii.Error, ValueError):
        raise ValueError(f"what follows {_SECRET_PREFIX} in a secret is base64") from None
    if len(raw) < _SECRET_BYTES_MIN:
        raise ValueError(f"a webhook secret has at least {_SECRET_BYTES_MIN} bytes")
    return raw


def _decoded(coded: str) -> bytes:
    """Base64 in either alphabet, with or without padding: all forms are in use."""
    plain = coded.rstrip("=").replace("-", "+").replace("_", "/")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)


_ANY = "*"


class EndpointSecrets(Protocol):
    """A source of signing secrets, such as the ledger of an inbox."""

    async def live(self, requester_id: str) -> Sequence[Secret]:
        """The requester's live secrets, the newest first: one, or two during a rotation.

        Each is the text that the requester has (`whsec_...`), or raw bytes.
        """


async def live_keys(secrets: EndpointSecrets, requester_id: str) -> list[bytes]:
    """The keys to sign with, at most two of them."""
    found = [one.reveal() for one in await secrets.live(requester_id)]
    return [
        read_secret(raw.decode()) if raw.startswith(b"whsec_") else raw
        for raw in found[:_SECRETS_MAX]
    ]


class ChainedSecrets:
    """Several sources in order; the first one that has secrets of the requester counts."""

    def __init__(self, *sources: EndpointSecrets) -> None:
        self._sources = sources

    async def live(self, requester_id: str) -> Sequence[Secret]:
        """The secrets of the first source that has any."""
        for source in self._sources:
            if found := await source.live(requester_id):
                return found
        return []


class CachedSecrets:
    """A source whose answers are cached for a second per requester.

    A new or expired secret is noticed that much later; a retry of a refused delivery comes later
    still. Concurrent lookups of a requester share one call. Errors are not cached.
    """

    def __init__(
        self,
        source: EndpointSecrets,
        *,
        keep_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup = CachedLookup(source.live, keep_s=keep_s, clock=clock)

    async def live(self, requester_id: str) -> Sequence[Secret]:
        """The secrets, at most `keep_s` old."""
        return await self._lookup.get(requester_id)


class StaticSecrets:
    """Secrets from the configuration."""

    def __init__(self, by_requester: dict[str, list[Secret]]) -> None:
        self._by_requester = by_requester

    async def live(self, requester_id: str) -> Sequence[Secret]:
        """The requester's own secrets, else those of `*`, else none."""
        default = self._by_requester.get(_ANY, [])
        return self._by_requester.get(requester_id, default)

    def has(self, requester_id: str) -> bool:
        """Whether the requester has a secret, its own or that of `*`."""
        return not self._by_requester.keys().isdisjoint((requester_id, _ANY))


def read_secrets(text: str) -> StaticSecrets:
    """Parse lines of `requester = secret`. Errors name the line, never its content."""
    found: dict[str, list[Secret]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        name, _, value = entry.partition("=")
        requester, texts = name.strip(), value.split()
        if not requester or requester in found or not 1 <= len(texts) <= _SECRETS_MAX:
            raise UsageError(
                f"webhook secrets, line {number}: write `requester = secret`, or two secrets, "
                "newer first, and each requester once"
            )
        try:
            found[requester] = [Secret(read_secret(each)) for each in texts]
        except ValueError as error:
            raise UsageError(f"webhook secrets, line {number}: {error}") from None
    return StaticSecrets(found)


_REFUSED = (401, 403)
_RECEIVERS_MAX = 10_000

Send = Callable[[Sequence[bytes]], Awaitable[Response]]
"""Sends one request signed with these keys; the first makes the contract's signature."""


class KeyRotation:
    """Remembers which of two live secrets a receiver accepts during a rotation."""

    def __init__(self) -> None:
        self._accepted: dict[str, bytes] = {}

    async def send(self, receiver: str, live: Sequence[bytes], send: Send) -> Response:
        """Send; if the receiver refuses the signature, send again with the other key first."""
        if len(live) < 2:
            return await send(live)
        first = self._accepted.get(receiver, live[-1])
        keys = sorted(live, key=lambda key: key != first)
        answer = await send(keys)
        if answer.status in _REFUSED:
            keys.reverse()
            answer = await send(keys)
        if answer.status not in _REFUSED:
            if len(self._accepted) >= _RECEIVERS_MAX:
                self._accepted.clear()
            self._accepted[receiver] = keys[0]
        return answer
