"""From an outcome to the arguments of the settle script, and back from its answer."""

from __future__ import annotations

from typing import Any

import msgspec

from tenure.contracts.omniq.errors import lost
from tenure.core.job import short_hash
from tenure.core.lease import Lease
from tenure.core.outcome import (
    BURIED,
    CANCELLED,
    COMPLETED,
    RELEASED,
    Failure,
    Outcome,
    Retried,
    Verdict,
)
from tenure.store.redis import Arg

_NULL_H = short_hash(b"null")
_ERROR_BYTES_MAX = 4096
_VERDICTS: dict[bytes, Verdict] = {
    b"bury": BURIED,
    b"release": RELEASED,
    b"cancel": CANCELLED,
}


def settle_args(outcome: Outcome) -> tuple[Arg, ...]:
    """What the script takes for one outcome."""
    lease = outcome.lease
    if outcome.kind == "complete":
        result = outcome.result
        result_h = _NULL_H if result == b"null" else short_hash(result)
        return (
            lease.job_id, lease.token, lease.fence, "complete", 0, result, result_h, "", "", "",
        )  # fmt: skip
    said, as_json, code = failure_args(outcome.failure)
    return (
        lease.job_id, lease.token, lease.fence, outcome.kind, outcome.delay_ms, "", "", said,
        as_json, code,
    )  # fmt: skip


def failure_args(failure: Failure | None) -> tuple[Arg, Arg, Arg]:
    """An error for people (what OmniQ calls `last_error`), for programs, and its code alone."""
    if failure is None:
        return "", "", ""
    said = f"{failure.code}: {failure.message}".encode()[:_ERROR_BYTES_MAX]
    code = "".join(failure.code.split())[:80]
    return said.decode(errors="ignore"), msgspec.json.encode(failure), code


def verdict_of(lease: Lease, reply: Any) -> Verdict:
    """The seam's verdict for the script's."""
    if reply == 1:
        return COMPLETED
    kind, detail = reply
    if kind == b"lost":
        return lost(lease.job_id, detail)
    if kind == b"retry":
        return Retried(detail)
    return _VERDICTS[kind]
