"""What can go wrong on the way out.

    EgressError
    ├── Refused         the guard says no; it will say so again
    ├── Unreachable     no name, no connection, no valid certificate, or not in time
    ├── Disconnected    the peer hung up in the middle
    └── TooLarge        more bytes than agreed

No message holds more of a URL than its scheme, host and port: paths and queries carry secrets.
"""

from __future__ import annotations

from tenure.core.errors import TenureError


class EgressError(TenureError):
    """Root of what an outbound request may raise."""

    code = "egress"


class Refused(EgressError):
    """The URL or the address behind it is not one that this worker may speak to."""

    code = "address_refused"


class Unreachable(EgressError):
    """Nothing was exchanged, or not within the deadline."""

    code = "unreachable"


class Disconnected(EgressError):
    """The connection ended before the answer did.

    `stale` is true when it had served an earlier request and broke before a byte of this answer:
    most likely the peer had closed it while idle, and a fresh connection will do.
    """

    code = "disconnected"

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale


class TooLarge(EgressError):
    """The peer sent, or would send, more than the limit."""

    code = "too_large"
