"""Prints docs/contracts/features.md, made from what the contracts declare of themselves.

.venv/bin/python bin/features.py > docs/contracts/features.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tenure.core.registry import Contract, contracts, parse_url
from tenure.core.seam import LedgerFeatures, QueueFeatures

HEAD = """\
# Features by contract

This table is generated from the declarations of the contracts by `bin/features.py`. The pages of
the [contracts](index.md) have the details.
"""
TAIL = """
Every contract has: leases with fences, retries with backoff, timeouts, delays, `id` and `key` for
safe submits, pause and resume, search in the dashboard, and a journal of every step. A plane that
sends messages over Redis has no priorities. `memory` stores the name of a group only.
"""


@dataclass(frozen=True, slots=True)
class Declared:
    """What one contract declares: its descriptor, and the features of its queue and ledger."""

    contract: Contract
    queue: QueueFeatures
    ledger: LedgerFeatures


def option(name: str) -> Callable[[Declared], bool]:
    return lambda it: name in it.contract.submit_options


ROWS: tuple[tuple[str, Callable[[Declared], bool]], ...] = (
    ("priorities (`priority`)", option("priority")),
    ("groups (`group`)", option("group")),
    ("time to live (`ttl_s`)", option("ttl_s")),
    ("unique jobs (`unique`)", option("unique")),
    ("schedules: cron and intervals", lambda it: it.queue.schedules is not None),
    ("chains and gathers", lambda it: it.contract.has_flows),
    ("a handler can wait for jobs that it added (`Park`)", lambda it: it.queue.parks),
    ("a handler can replace its payload", lambda it: it.queue.replaces_payload),
    ("a task can compute the delay of a retry", lambda it: it.queue.custom_backoff is not None),
    ("what was submitted first starts first", lambda it: it.contract.is_fifo),
    ("HTTP endpoints of its own", lambda it: it.contract.routes is not None),
    ("outbox with signed webhooks", lambda it: "outbox" in it.contract.parts),
    ("encrypted credentials", lambda it: "credentials" in it.contract.parts),
    ("quota of unfinished jobs per API key", lambda it: it.ledger.unfinished is not None),
    ("unreadable records are set aside", lambda it: it.queue.take_quarantined is not None),
    ("bulk reading by Spark", lambda it: it.contract.journal_format is not None),
)


async def declared() -> dict[str, Declared]:
    """Every contract, opened at its example address; nothing is connected to."""
    found = {}
    for name, contract in contracts().items():
        url = parse_url(contract.example_url)
        queue, ledger = contract.open_queue(url, "features"), contract.open_ledger(url)
        found[name] = Declared(contract, queue.features, ledger.features)
    return found


def table(found: dict[str, Declared]) -> str:
    """The page."""
    names = sorted(found)
    lines = [
        f"| feature | {' | '.join(f'`{name}`' for name in names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for title, has in ROWS:
        cells = ["yes" if has(found[name]) else "-" for name in names]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([HEAD, *lines, TAIL.rstrip("\n")])


if __name__ == "__main__":
    print(table(asyncio.run(declared())))
