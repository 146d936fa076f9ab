"""News of running jobs: what may be said, and how the report script takes it."""

from __future__ import annotations

import msgspec

from tenure.contracts.bullmq.claimed import Claimed, token_h_of
from tenure.contracts.bullmq.options import CONTRACT
from tenure.core.errors import UsageError
from tenure.core.lease import Lease, Report
from tenure.store.redis import Arg

# Events of BullMQ's own that say where a job stands: a handler's news must not look like them.
RESERVED_EVENTS = frozenset(
    (
        *("added", "waiting", "active", "completed", "failed", "delayed", "drained", "paused"),
        *("resumed", "removed", "stalled", "retries-exhausted", "waiting-children", "duplicated"),
        *("deduplicated", "cleaned", "debounced", "retry"),
    )
)


def check(report: Report) -> None:
    """Refuse news that BullMQ's readers would take for something else (B-30)."""
    if report.type in RESERVED_EVENTS:
        raise UsageError(
            f"a handler cannot report {report.type!r}: that is an event of BullMQ's own; "
            "return, raise, or use another name",
            contract=CONTRACT,
        )
    if report.progress and report.progress.lstrip(b"-").isdigit():
        percent = int(report.progress)
        if not 0 <= percent <= 100:
            raise UsageError(
                f"progress {percent}: a whole number is a percentage, 0 to 100; "
                "anything else goes as an object",
                contract=CONTRACT,
            )


def row(report: Report) -> tuple[Arg, ...]:
    """The nine arguments of one report, in the order of report-16.lua."""
    lease = report.lease
    if report.payload:
        kind, data = "", report.payload
        return lease.job_id, lease.fence, lease.token, kind, "", "", data, token_h_of(lease), ""
    data = _line(report.data) if report.type == "log" else report.data
    return (
        lease.job_id, lease.fence, lease.token, report.type, report.progress, report.step, data,
        token_h_of(lease), _lines_kept(lease),
    )  # fmt: skip


def _line(data: bytes) -> bytes:
    """What a report of the type "log" says: its `text`, or all of it where it has none."""
    told = msgspec.json.decode(data)
    text = told.get("text") if isinstance(told, dict) else told
    return text.encode(errors="replace") if isinstance(text, str) else data


def _lines_kept(lease: Lease) -> Arg:
    """How many lines of its log the job keeps; "" for all."""
    keep = lease.extra.options.keep_logs if isinstance(lease.extra, Claimed) else None
    return keep if keep and keep > 0 else ""
