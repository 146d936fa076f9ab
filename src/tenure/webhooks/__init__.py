"""Webhooks: events signed, delivered by the same worker as any job, and verified by receivers.

`signing` makes the four headers, and the Standard Webhooks ones beside them if wanted. `deliver` is
the handler of the outbox queue: one attempt, freshly signed, through the guarded client; `answers`
says what the receiver's status asks for. `refresh` asks a requester for new storage credentials.
Receivers use `verify`, which needs nothing of a worker; `receiving` and `replay` hold it.
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
