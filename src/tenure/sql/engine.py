"""What the SQL queues need of a database (`Engine`), and the settings of one queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from tenure.core.opening import check_least
from tenure.sql.operations import Dialect, without_comments
from tenure.store.beside import folder_beside

_DAY_MS = 86_400_000
_KEPT_MS_MAX = 2**53


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One queue of one table. `lost_max` is how often a job's lease may run out (claim budget).

    `depth_max` 0 is no limit. `unread_ms` is how long history is kept that a reader has not read.
    `keep_credentials` leaves sealed credentials with jobs that have ended. `share` is how many jobs
    of one requester a worker holds at once, `requester_max` how many all workers do (0: any).
    """

    contract: str
    table: str
    queue: str
    lease_ms: int
    max_attempts: int
    lost_max: int
    depth_max: int
    idempotency_ms: int
    keep_ms: int
    journal_ms: int
    unread_ms: int
    keep_credentials: bool = False
    share: int = 0
    requester_max: int = 0


class SqlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the queue URL of every contract over the ledger may say; each adds its own.

    `schema` names one of several ledgers of a PostgreSQL database, `connections` is how many
    connections to it an event loop opens at most. `keep_ms` is how long ended
    jobs are kept (0: for ever), `journal_days` how long history is; what a capture has not yet read
    of it stays for up to `unread_days`. `lost_max` is the claim budget: how often the lease of one
    job may run out. `synchronous=full` survives a power cut; `normal` may lose the last commits
    then, and nothing else (SQLite's `synchronous`, PostgreSQL's `synchronous_commit`).
    """

    schema: str = "tenure"
    lease_ms: int = 30_000
    max_attempts: int = 5
    retry_delay_ms: int = 1_000
    lost_max: int = 5
    depth_max: int = 0
    idempotency_ttl_s: int = 86_400
    keep_ms: int = 0
    journal_days: float = 30.0
    unread_days: float = 90.0
    synchronous: Literal["full", "normal"] = "full"
    connections: int = 3

    def check(self, contract: str) -> None:
        """Refuse numbers with which no box could work."""
        check_least(
            self, contract, lease_ms=50, max_attempts=1, lost_max=1, keep_ms=0, connections=1
        )

    def of_box(self, *, contract: str, table: str, queue: str) -> QueueSettings:
        """How this queue of this table behaves."""
        return QueueSettings(
            contract=contract,
            table=table,
            queue=queue,
            lease_ms=self.lease_ms,
            max_attempts=self.max_attempts,
            lost_max=self.lost_max,
            depth_max=self.depth_max,
            idempotency_ms=self.idempotency_ttl_s * 1000,
            keep_ms=self.keep_ms,
            journal_ms=min(round(self.journal_days * _DAY_MS), _KEPT_MS_MAX),
            unread_ms=min(round(max(self.journal_days, self.unread_days) * _DAY_MS), _KEPT_MS_MAX),
        )

    def engine(self, store: str, *, pinned: bool) -> dict[str, Any]:
        """What the database is told."""
        if store.startswith("postgres"):
            return {
                "schema": self.schema,
                "pinned": pinned,
                "synchronous": self.synchronous,
                "connections": self.connections,
            }
        return {"synchronous": self.synchronous}


PACKAGE = "tenure.sql"
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


class QueueListener(Protocol):
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

    def bell(self, queue: str) -> QueueListener:
        """A bell that rings when a queue has work; it may ring for one of all who wait."""

    def journal_bell(self, queue: str) -> QueueListener:
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
    path = folder_beside(PACKAGE, "sql", dialect, "parts") / f"{name}.sql"
    return without_comments(path.read_text(encoding="utf-8"))


def words_of(table: str, now: str) -> dict[str, str]:
    """The fragments of the statements of one box that are the same on both engines."""
    words = {"jobs": table, "now": now, "running": RUNNING, "in_turn": "true", "after_settle": ""}
    words["known_attempt"] = _KNOWN_ATTEMPT
    words["response"] = f"'{RESPONSE[0]}' || job_id || '{RESPONSE[1]}'" if table == INBOX else "''"
    return words | {"held_back": _HELD_BACK if table == OUTBOX else "false"}
