"""Jobs that another program left in a state that cannot be read: set aside, never handed out.

A text of SQLite may hold bytes that are no text, and a plane's payload may be no JSON. Such a job
is buried under the lease that the claim took, with the reason, and its neighbours go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from tenure.core.lease import Lease
from tenure.core.outcome import Failure, Outcome, Verdict
from tenure.core.seam import Quarantined

_syntax = msgspec.json.Decoder(msgspec.Raw).decode
_NOTED_MAX = 1_000

Settle: TypeAlias = Callable[[Sequence[Outcome]], Awaitable[list[Verdict]]]


class UnreadableRow(dict[str, Any]):
    """A row as well as it can be shown; `why` says which of its texts is none, if one is."""

    def __init__(self, names: Sequence[str], values: Sequence[Any]) -> None:
        super().__init__()
        self.why = ""
        for name, value in zip(names, values, strict=True):
            if isinstance(value, bytes):
                self[name] = value.decode(errors="replace")
                if self[name].encode() != value:
                    # Not the value: those who may not read the payload read this reason.
                    self.why = f"column {name} is not UTF-8"
            else:
                self[name] = value


def why_unreadable(row: Any) -> str:
    """Why the job of a row cannot be handed out; "" when it can."""
    return row.why if isinstance(row, UnreadableRow) else ""


def why_no_json(payload: bytes) -> str:
    """Why a payload cannot be part of a JSON text; "" when it can."""
    try:
        _syntax(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"the payload is not JSON: {error}"
    return ""


async def set_aside(
    leases: Sequence[Lease], reasons: Sequence[str], settle: Settle, noted: list[Quarantined]
) -> list[Lease]:
    """Bury the jobs that have a reason not to be handed out, and note them; returns the others."""
    ends: list[Outcome] = []
    for lease, why in zip(leases, reasons, strict=True):
        if why:
            noted.append(Quarantined(lease.job_id, why))
            failure = Failure(code="unreadable", message=why, retryable=False)
            ends.append(Outcome(lease, "bury", failure=failure))
    del noted[:-_NOTED_MAX]
    await settle(ends)
    return [lease for lease, why in zip(leases, reasons, strict=True) if not why]
