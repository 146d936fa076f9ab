"""What the ledger needs of a database: run an operation, ring when something changed, keep order.

The operations are the files of `sql/<dialect>`, with the same names and parameters in both, so that
everything above this line is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tenure.store.files import package_folder
from tenure.store.queries import Dialect, without_comments

PACKAGE = "tenure.ledger"
INBOX = "inbox_jobs"
OUTBOX = "job_outbox_events"
PLANE = "plane_jobs"
IN_BULK = 500
"""From so many jobs on a submit is a bulk submit, which keeps its turn beside another one."""

RESPONSE = ('{"job_id":"', '","status":"queued"}')
"""What is before and after the job's id in the answer that is kept with an idempotency key."""

RUNNING = "('claimed', 'fetching', 'processing', 'uploading')"

# The attempt that ends has a row since its claim where the contract wants one; and a row that
# another program put in its place must not stop the neighbours.
_KNOWN_ATTEMPT = """
  WHERE true ON CONFLICT (job_id, claim_version, queue) DO UPDATE SET
    (attempt, worker_id, claimed_ms, ended_ms, verdict, outcome_h, error_code, error, due_ms)
    = (excluded.attempt, excluded.worker_id, excluded.claimed_ms, excluded.ended_ms,
      excluded.verdict, excluded.outcome_h, excluded.error_code, excluded.error, excluded.due_ms)"""
_HELD_BACK = (
    f"EXISTS (SELECT 1 FROM {OUTBOX} WHERE queue = :queue"  # nosec B608 # a constant
    " AND status = 'queued' AND NOT ready AND due_ms = 0)"
)

Row = Any
"""A row, read by name or by position."""


class Bell(Protocol):
    """Wakes a claimer when somebody may have put something into its queue."""

    async def arm(self) -> bool:
        """From now on no ring is missed; whether one came that nothing was done about."""

    async def wait(self, wait_ms: int) -> None:
        """Until it rings or the time is up."""

    async def rest(self, *, more: bool) -> None:
        """Miss rings until it is armed again. With `more` to do, another one is woken instead.

        Where a ring wakes one of all who wait, one that came and was not waited for is passed on,
        unless the bell is armed again within a moment.
        """

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
        """A bell that rings when a queue has work; it may ring for one of all who wait."""

    def journal_bell(self, queue: str) -> Bell:
        """A bell that rings for everybody when a queue may have history to read."""

    @property
    def channel(self) -> str:
        """Where writers ring; a parameter of operations that put something into the line."""

    async def settled_position(self) -> int:
        """A journal position such that no event before it is still to come."""

    async def close(self) -> None:
        """Let go of connections."""


def part(dialect: Dialect, name: str) -> str:
    """A fragment of several statements, from its file."""
    path = package_folder(PACKAGE, "sql", dialect, "parts") / f"{name}.sql"
    return without_comments(path.read_text(encoding="utf-8"))


def words_of(table: str, now: str) -> dict[str, str]:
    """The fragments of the statements of one box that are the same on both engines."""
    words = {"jobs": table, "now": now, "running": RUNNING, "in_turn": "true", "after_settle": ""}
    words["known_attempt"] = _KNOWN_ATTEMPT
    words["response"] = f"'{RESPONSE[0]}' || job_id || '{RESPONSE[1]}'" if table == INBOX else "''"
    return words | {"held_back": _HELD_BACK if table == OUTBOX else "false"}
