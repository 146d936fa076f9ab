"""What the end of a lease needs and its beginning brought; it travels in `Lease.extra`."""

from __future__ import annotations

import msgspec

from leasehold.contracts.bullmq.job_options import JobOptions
from leasehold.core.idempotency import short_hash
from leasehold.core.lease import Lease


class Claimed(msgspec.Struct, frozen=True):
    """Counts, options, earlier stacks, and the hash of the token for the journal."""

    attempts_made: int
    stalled: int
    options: JobOptions
    stacktrace: bytes
    token_h: str


def token_h_of(lease: Lease) -> str:
    """The hash of the lease's token, made once a claim."""
    extra = lease.extra
    if isinstance(extra, Claimed) and extra.token_h:
        return extra.token_h
    return short_hash(lease.token.encode())
