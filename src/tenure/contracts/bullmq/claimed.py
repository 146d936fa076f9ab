"""What the end of a lease needs and its beginning brought; it travels in `Lease.extra`."""

from __future__ import annotations

from typing import Any

import msgspec

from tenure.contracts.bullmq.job_options import JobOptions, unpack
from tenure.core.job import short_hash
from tenure.core.lease import Lease


class Claimed(msgspec.Struct, frozen=True):
    """Counts, options as read and as stored, earlier stacks, and the token's hash."""

    attempts_made: int
    stalled: int
    options: JobOptions
    stacktrace: bytes
    token_h: str
    raw_options: bytes = b"{}"

    @property
    def opts(self) -> dict[str, Any]:
        """The job's options under BullMQ's names, which its handler sees as `job.opts`."""
        return unpack(self.raw_options)


def token_h_of(lease: Lease) -> str:
    """The hash of the lease's token, made once a claim."""
    extra = lease.extra
    if isinstance(extra, Claimed) and extra.token_h:
        return extra.token_h
    return short_hash(lease.token.encode())
