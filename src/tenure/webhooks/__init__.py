"""Webhooks: signing, delivery, verification by receivers, and refresh of storage credentials.

`signing` makes the headers of a delivery. `deliver` is the handler of the outbox queue, which any
worker runs; `slots` limits its concurrent requests. `refresh` asks a requester for new storage
credentials. Receivers use `verify` of `receiver`, which needs no worker.
"""

from tenure.webhooks.receiver import (
    InvalidWebhook,
    MemoryNonces,
    NonceStore,
    SqliteNonces,
    Verified,
    check,
    verify,
)
from tenure.webhooks.signing import HEADERS, new_secret, read_secret, signed_headers

__all__ = [
    "HEADERS",
    "InvalidWebhook",
    "MemoryNonces",
    "NonceStore",
    "SqliteNonces",
    "Verified",
    "check",
    "new_secret",
    "read_secret",
    "signed_headers",
    "verify",
]
