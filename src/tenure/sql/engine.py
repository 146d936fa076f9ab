"""The interface of a database for SQL queues (`Engine`), and the settings of one queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from tenure.core.registry import check_least
from tenure.core.state import Machine

INBOX = "inbox_jobs"
OUTBOX = "job_outbox_events"
PLANE = "plane_jobs"
IN_BULK = 500
"""A submit of at least this many jobs is a bulk submit; two of them may run at once."""

_DAY_MS = 86_400_000
_KEEP_MS_MAX = 2**53

Row = Any
"""A row, read by name or by position."""

# The states of a row. `failed` is not final: it goes to queued while attempts remain, else to
# dead_letter. A handler that reports no stages passes through all of them. A job that is cancelled
# or expires while it waits reaches `failed` through `claimed`. Reopening begins the job anew, with
# a new row.
ROW_MACHINE = Machine(
    contract="sql",
    initial=("queued",),
    running=("claimed", "fetching", "processing", "uploading"),
    final=("succeeded", "dead_letter"),
    steps={
        "queued": ("claimed",),
        "claimed": ("fetching", "queued", "failed"),
        "fetching": ("processing", "queued", "failed"),
        "processing": ("uploading", "queued", "failed"),
        "uploading": ("succeeded", "queued", "failed"),
        "failed": ("queued", "dead_letter"),
    },
    reopen={"succeeded": ("queued",), "dead_letter": ("queued",)},
    order_slack_ms=10_000,
    combined_steps=(
        ("claimed", "fetching", "processing"),
        ("claimed", "fetching", "processing", "uploading"),
        ("fetching", "processing", "uploading"),
        ("claimed", "fetching", "processing", "uploading", "succeeded"),
        ("fetching", "processing", "uploading", "succeeded"),
        ("processing", "uploading", "succeeded"),
        ("queued", "claimed", "failed"),
    ),
)


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One queue of one table. `lost_max` is how often a job's lease may run out (claim budget).

    `depth_max` 0 means no limit. `unread_ms` is how long the journal is kept for a reader that has
    not read it. `keep_credentials` keeps sealed credentials of ended jobs. `share` is how many jobs
    of one requester a worker holds at once, `requester_max` how many all workers do (0: no limit).
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
    """The URL options that all SQL contracts have; each contract adds its own.

    `schema` is the PostgreSQL schema, `connections` how many connections an event loop opens at
    most. `keep_ms` is how long ended jobs are kept (0: for ever), `journal_days` how long history
    is; what a capture has not read yet stays for up to `unread_days`. `lost_max` is the claim
    budget: how often the lease of one job may run out. `synchronous=full` survives a power cut;
    `normal` may lose the last commits then, and nothing else (SQLite's `synchronous`, PostgreSQL's
    `synchronous_commit`).
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
        """Refuse numbers with which a queue cannot work."""
        check_least(
            self, contract, lease_ms=50, max_attempts=1, lost_max=1, keep_ms=0, connections=1
        )

    def of_table(self, *, contract: str, table: str, queue: str) -> QueueSettings:
        """The settings of one queue of one table."""
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
            journal_ms=min(round(self.journal_days * _DAY_MS), _KEEP_MS_MAX),
            unread_ms=min(round(max(self.journal_days, self.unread_days) * _DAY_MS), _KEEP_MS_MAX),
        )

    def engine(self, store: str, *, pinned: bool) -> dict[str, Any]:
        """The arguments of the engine."""
        if store.startswith("postgres"):
            return {
                "schema": self.schema,
                "pinned": pinned,
                "synchronous": self.synchronous,
                "connections": self.connections,
            }
        return {"synchronous": self.synchronous}


class QueueListener(Protocol):
    """Wakes a claimer when its queue may have work."""

    async def arm(self) -> bool:
        """Receive all notices from now on; returns whether an earlier one is still unused."""

    async def wait(self, wait_ms: int) -> None:
        """Return at the next notice, or when the time is up."""

    async def disarm(self, *, more: bool) -> None:
        """Ignore notices until it is armed again. With `more` to do, another claimer is woken.

        Where a notice wakes one claimer only, an unused notice is passed on to another one, unless
        the listener is armed again within a moment.
        """

    async def close(self) -> None:
        """Stop listening."""


class Engine(Protocol):
    """One database, for one event loop. `dialect` names the folder of its statements."""

    dialect: str

    async def run(
        self, table: str, operation: str, batch: Sequence[Sequence[Any]] = (), /, **params: Any
    ) -> Sequence[Row]:
        """Run one operation on a table as one transaction; `batch` is a list of rows."""

    def listener(self, queue: str) -> QueueListener:
        """Listens for work of a queue; a notice may wake only one of the listeners."""

    def journal_listener(self, queue: str) -> QueueListener:
        """Listens for new journal events of a queue; a notice wakes every listener."""

    @property
    def channel(self) -> str:
        """The notification channel; a parameter of operations that make jobs claimable."""

    async def settled_position(self) -> int:
        """A journal position such that no event before it is still to come."""

    async def close(self) -> None:
        """Close the connections."""


class UnreadableRow(dict[str, Any]):
    """A row with text that is not UTF-8, decoded as well as possible; `why` names the column."""

    def __init__(self, names: Sequence[str], values: Sequence[Any]) -> None:
        super().__init__()
        self.why = ""
        for name, value in zip(names, values, strict=True):
            if isinstance(value, bytes):
                self[name] = value.decode(errors="replace")
                if self[name].encode() != value:
                    # Without the value: readers of this reason may not be allowed to see it.
                    self.why = f"column {name} is not UTF-8"
            else:
                self[name] = value


def why_unreadable(row: Row) -> str:
    """Why the job of a row cannot be handed out; "" if it can."""
    return row.why if isinstance(row, UnreadableRow) else ""
