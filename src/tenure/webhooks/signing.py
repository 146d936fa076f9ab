"""The signature: HMAC-SHA256 over `timestamp.nonce.raw_body`, in lower-case hexadecimal.

While two secrets are live, the header holds the signature of one, as a receiver of the contract
expects it, and a second header that of the other. Every attempt has a new timestamp and a new
nonce; neither holds a dot, so the three parts cannot be read in two ways. The event id is not part
of the signed text, which is the contract's; it therefore stands in the body too, and receivers hold
one against the other.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

SIGNATURE = "x-euterpe-signature"
TIMESTAMP = "x-euterpe-timestamp"
NONCE = "x-euterpe-nonce"
EVENT_ID = "x-euterpe-event-id"
OTHER_SIGNATURE = "x-euterpe-signature-other"
HEADERS = (SIGNATURE, TIMESTAMP, NONCE, EVENT_ID)

STANDARD_ID = "webhook-id"
STANDARD_TIMESTAMP = "webhook-timestamp"
STANDARD_SIGNATURE = "webhook-signature"

NONCE_FORM = re.compile(r"[A-Za-z0-9_-]{22,64}")
SECRETS_MAX = 2
_SECRET_PREFIX = "whsec_"
_SECRET_BYTES_MIN = 24


def signature(secret: bytes, timestamp: str, nonce: str, body: bytes) -> str:
    """One signature, as it stands in the header.

    >>> signature(b"k" * 24, "1700000000", "n" * 22, b"{}")[:16]
    '241763caab3e6a1a'
    """
    text = f"{timestamp}.{nonce}.".encode() + body
    return hmac.digest(secret, text, hashlib.sha256).hex()


def standard_signature(secret: bytes, event_id: str, timestamp: str, body: bytes) -> str:
    """One signature in the form of Standard Webhooks."""
    text = f"{event_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, text, hashlib.sha256)).decode()


def new_nonce() -> str:
    """192 random bits without a dot."""
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
    """The headers of one attempt; the first of the live secrets signs the contract's header."""
    timestamp = str(now_s)
    first, *others = [signature(secret, timestamp, nonce, body) for secret in live]
    headers = [(SIGNATURE, first), (TIMESTAMP, timestamp), (NONCE, nonce), (EVENT_ID, event_id)]
    headers += [(OTHER_SIGNATURE, other) for other in others]
    if standard:
        theirs = " ".join(standard_signature(one, event_id, timestamp, body) for one in live)
        headers += [
            (STANDARD_ID, event_id),
            (STANDARD_TIMESTAMP, timestamp),
            (STANDARD_SIGNATURE, theirs),
        ]
    return headers


def new_secret() -> str:
    """A secret for an endpoint, in the form that `read_secret` and other libraries take."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def read_secret(text: str) -> bytes:
    """The bytes of a secret: `whsec_` and base64, or any text that is long enough.

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
    """Base64 in either alphabet, with or without its padding: both are about."""
    plain = coded.rstrip("=").replace("-", "+").replace("_", "/")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
