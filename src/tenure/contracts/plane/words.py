"""The contract's words for what the ledger keeps: states, streams, attempt ids."""

from __future__ import annotations

from tenure.core.errors import UsageError

CONTRACT = "plane"
_QUEUE = "plane/"

STATES = {
    "": "",
    "queued": "QUEUED",
    "claimed": "RUNNING",
    "fetching": "RUNNING",
    "processing": "RUNNING",
    "uploading": "RUNNING",
    "succeeded": "SUCCEEDED",
    "failed": "FAILED",
    "dead_letter": "DLQ",
}
"""The ledger's states in the contract's words. A running job of the plane has no stages."""


def queue_of(stream: str) -> str:
    """The ledger's queue of a stream, which no inbox of the same database shares."""
    return _QUEUE + stream


def stream_of(queue: str) -> str:
    """The stream of a queue of the ledger."""
    return queue.removeprefix(_QUEUE)


def attempt_id_of(job_id: str, fence: int) -> str:
    """The name of one attempt.

    >>> attempt_id_of("7d", 3)
    '7d:3'
    """
    return f"{job_id}:{fence}"


def fence_of(job_id: str, attempt_id: str) -> int:
    """The fence that an attempt id names; raises when it is no attempt of this job."""
    owner, _, number = attempt_id.rpartition(":")
    if owner != job_id or not number.isdecimal() or not number.isascii() or len(number) > 18:
        raise UsageError(
            f"attempt_id {attempt_id[:160]!r} names no attempt of job {job_id[:140]!r}; send it as "
            "the claim gave it",
            contract=CONTRACT,
        )
    return int(number)
