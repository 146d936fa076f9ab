"""What the ledger needs of a database: run an operation, ring when something changed, keep order.

The operations are the files of `sql/<dialect>`, with the same names and parameters in both, so that
everything above this line is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from leasehold.store.beside import folder_beside
from leasehold.store.statements import Dialect, without_comments

PACKAGE = "leasehold.ledger"
INBOX = "inbox_jobs"
OUTBOX = "job_outbox_events"
PLANE = "plane_jobs"
IN_BULK = 500
"""From so many jobs on a submit is a bulk submit, which keeps its turn beside another one."""

RESPONSE = ('{"job_id":"', '","status":"queued"}')
"""What is before and after the job's id in the answer that is kept with an idempotency key."""

RUNNING = "('claimed', 'fetching', 'processing', 'uploading')"

Row = Any
"""A row, read by name or by position."""


class Bell(Protocol):
    """Wakes a claimer when somebody may have put something into its queue."""

    async def arm(self) -> None:
        """From now on no ring is missed."""

    async def wait(self, wait_ms: int) -> None:
        """Until it rings or the time is up."""

    async def close(self) -> None:
        """Let go."""


class Engine(Protocol):
    """One database, for one event loop. `dialect` names the folder of its statements."""

    dialect: str

    async def run(
        self, table: str, operation: str, batch: Sequence[Sequence[Any]] = (), /, **takes: Any
    ) -> Sequence[Row]:
        """Run one operation on a box as one transaction; `batch` is a list of rows."""

    def bell(self, queue: str) -> Bell:
        """A bell for one queue."""

    @property
    def channel(self) -> str:
        """Where writers ring; a parameter of operations that put something into the line."""

    async def settled_position(self) -> int:
        """A journal position such that no event before it is still to come."""

    async def close(self) -> None:
        """Let go of connections."""


def part(dialect: Dialect, name: str) -> str:
    """A fragment of several statements, from its file."""
    path = folder_beside(PACKAGE, "sql", dialect, "parts") / f"{name}.sql"
    return without_comments(path.read_text(encoding="utf-8"))


def words_of(table: str, now: str) -> dict[str, str]:
    """The fragments of the statements of one box that are the same on both engines."""
    return {
        "jobs": table,
        "now": now,
        "running": RUNNING,
        "in_turn": "true",
        "after_settle": "",
        "response": f"'{RESPONSE[0]}' || job_id || '{RESPONSE[1]}'" if table == INBOX else "''",
    }
