"""What the calls of OmniQ's own client answer."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from tenure.contracts.omniq.errors import Refused
from tenure.core.seam import Quarantined

Lane = Literal["wait", "gwait", "delayed", "failed", "completed"]
LANES: tuple[Lane, ...] = ("wait", "gwait", "delayed", "failed", "completed")


class Paused(msgspec.Struct, frozen=True):
    """`reserve` of a paused queue."""

    status: Literal["PAUSED"] = "PAUSED"


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: `payload` is the JSON text, `lease_token` gates heartbeat and acks."""

    status: Literal["JOB"] = "JOB"
    job_id: str
    payload: str
    lock_until_ms: int
    attempt: int
    max_attempts: int
    gid: str
    lease_token: str


class BatchItem(msgspec.Struct, frozen=True):
    """What became of one job of a batch: `status` is OK or ERR, and then `reason` says why."""

    job_id: str
    status: Literal["OK", "ERR"]
    reason: str | None = None


ReserveResult: TypeAlias = Paused | Reserved | None
AckFailResult: TypeAlias = tuple[Literal["RETRY"], int] | tuple[Literal["FAILED"], None]


def reserved(row: list[Any]) -> Reserved:
    """A row of the claim script."""
    return Reserved(
        job_id=row[0].decode(),
        payload=row[1].decode(errors="replace"),
        lock_until_ms=row[2],
        attempt=row[3],
        max_attempts=row[4],
        gid=row[5].decode(errors="replace"),
        lease_token=row[6].decode(),
    )


def quarantined(rows: list[bytes]) -> list[Quarantined]:
    """What a script set aside: each row is an id and a reason."""
    parts = (row.decode(errors="replace").partition("\n") for row in rows)
    return [Quarantined(job_id, reason) for job_id, _, reason in parts]


def batch_item(job_id: str, word: str) -> BatchItem:
    """The steering script's word for one job."""
    return BatchItem(job_id, "OK") if word == "OK" else BatchItem(job_id, "ERR", word)


def check_accepted(operation: str, item: BatchItem) -> None:
    """Raise `Refused` for a job that was not accepted."""
    if item.reason is not None:
        raise Refused(operation, f"job {item.job_id}", item.reason)
