"""The history of the queue: the stream `jobs:journal`, written by the scripts.

Lines as `store.journal` reads them: parts in the order of `_FIELDS`, cut off after the last that
applies.
"""

from __future__ import annotations

from typing import cast

from leasehold.contracts.streams.options import CONTRACT, QUEUE, Options, keys
from leasehold.core.lease import Lease
from leasehold.store.journal import Lines, StreamJournal
from leasehold.store.redis import Redis

_FIELDS = (
    "job_id",
    "type",
    "ver",
    "ts_ms",
    "task",
    "from_state",
    "to_state",
    "attempt",
    "fence",
    "prev_fence",
    "lease_until_ms",
    "prev_lease_until_ms",
    "worker_id",
    "max_attempts",
    "result_h",
    "payload_h",
    "error_code",
    "due_ms",
    "data",
)
NOTHING_GIVEN: tuple[str | bytes, ...] = ("",) * 6
_LINES = Lines(_FIELDS, contract=CONTRACT, queue=QUEUE)


class StreamsJournal(StreamJournal):
    """The journal of this contract."""

    def __init__(self, redis: Redis, options: Options) -> None:
        super().__init__(redis, keys(options.namespace)[1], _LINES)


def completion(lease: Lease, result_h: str) -> tuple[str | bytes, ...]:
    """What the settle script needs to end a job that is still as its holder was given it.

    The lease words it should have and shall have, its ttl_s and the end of its lease, and the
    journal line before and after the time. Nothing of that for a lease that contradicts its words:
    the script shall look closer.
    """
    if lease.extra is None:
        return NOTHING_GIVEN
    words, ttl_s = cast("tuple[str, bytes]", lease.extra)
    fence, ver, attempt, max_attempts, lost, until, worker, msg_id, rest = words.split(" ", 8)
    if (int(fence), worker, msg_id) != (lease.fence, lease.token, lease.handle):
        return NOTHING_GIVEN
    ver = str(int(ver) + 1)
    after = (
        f"\t{lease.task}\trunning\tdone\t{attempt}\t{fence}\t{fence}\t0\t{until}\t{worker}"
        f"\t{max_attempts}\t{result_h}"
    )
    return (
        words,
        f"{fence} {ver} {attempt} {max_attempts} {lost} 0 {worker} {msg_id} {rest}",
        ttl_s,
        until,
        f"{lease.job_id}\tcomplete\t{ver}\t",
        after,
    )
