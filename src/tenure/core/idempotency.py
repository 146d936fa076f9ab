"""When two requests are the same request: canonical bodies, their hash, and scoped keys."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from tenure.core.errors import UsageError

KEY_CHARS_MAX = 255


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes.

    >>> canonical({"b": 1, "a": [1.0, None]})
    b'{"a":[1.0,null],"b":1}'
    """
    return msgspec.json.encode(value, order="sorted")


def request_hash(*parts: Any) -> str:
    """A hash that two requests share exactly when all their parts are equal."""
    return hashlib.sha256(canonical(parts)).hexdigest()[:32]


def short_hash(data: bytes) -> str:
    """What the journal keeps of a payload, a result or a token."""
    return hashlib.sha256(data).hexdigest()[:16]


def scoped_key(requester: str, key: str) -> str:
    """The store's key for a caller's idempotency key: one requester never meets another's.

    The anonymous requester's key stays as it is, as the contract says; every other is marked with
    `@requester:`, and an anonymous key that looks like such a mark gets an empty one.

    >>> scoped_key("", "order-17"), scoped_key("k1", "order-17"), scoped_key("", "@k1:order-17")
    ('order-17', '@k1:order-17', '@:@k1:order-17')
    """
    check_key(key)
    if not requester and not key.startswith("@"):
        return key
    return f"@{requester}:{key}"


def check_key(key: str) -> None:
    """Refuse keys that no store should hold."""
    if not key or len(key) > KEY_CHARS_MAX or not key.isprintable():
        raise UsageError(
            f"an idempotency key has 1 to {KEY_CHARS_MAX} printable characters; "
            f"this one has {len(key)}" + ("" if key.isprintable() else " and control characters")
        )
