"""Any queue, by what its ledger says: does it answer, does somebody work, does work pile up."""

from __future__ import annotations

import time

from tenure.cli.checks.finding import Finding, judged
from tenure.core.errors import TenureError
from tenure.core.registry import open_ledger, parse_url
from tenure.core.seam import Counts
from tenure.dashboard.gathering import by_kind

_OLD_MS = 600_000


async def ledger_findings(url: str) -> list[Finding]:
    """A queue that does not answer is one finding and ends it."""
    name = parse_url(url).safe
    ledger = open_ledger(url)
    begun = time.monotonic()
    try:
        counts = await ledger.counts()
    except TenureError as error:
        remedy = "start the store, or name another queue; after an upgrade: tenure db migrate"
        return [Finding("problem", "queue", f"{name}: {error}", remedy)]
    finally:
        await ledger.close()
    took_ms = (time.monotonic() - begun) * 1000
    return [Finding("ok", "queue", f"{name} in {took_ms:.1f} ms"), *count_findings(url, counts)]


def count_findings(url: str, counts: Counts) -> list[Finding]:
    """What depths, workers and ages mean."""
    kinds = by_kind(counts)
    waiting, failed = kinds.get("waiting", 0), kinds.get("failed", 0)
    name = parse_url(url).safe
    return [
        judged(
            "workers",
            f"{counts.workers}, and {waiting} jobs wait",
            bad=bool(waiting and not counts.workers and not counts.paused),
            remedy=f"start one: tenure worker app.py --from '{name}'",
        ),
        judged(
            "pause",
            "paused" if counts.paused else "handing out jobs",
            bad=counts.paused,
            level="note",
            remedy=f"tenure resume --queue '{name}'",
        ),
        judged(
            "oldest waiting",
            f"{counts.oldest_waiting_ms / 1000:.0f} s",
            bad=counts.oldest_waiting_ms > _OLD_MS,
            level="note",
            remedy="add workers or slots: tenure worker --concurrency, --processes",
        ),
        judged(
            "dead letters",
            f"{failed} jobs failed for good",
            bad=bool(failed),
            level="note",
            remedy=f"tenure dead '{name}' groups them by error",
        ),
    ]
