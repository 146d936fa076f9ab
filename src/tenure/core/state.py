"""The state machine of every contract, as data.

The rule: everything that decides whether a job may go from one state to another lives in these
tables. A step that is not in the table is an `InvalidTransition`; the property tests and the
diagrams in the documentation are made from the same tables. A step out of a `final` state exists
only where an operator may send a finished job back, and is listed under `reopen`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tenure.core.errors import InvalidTransition


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The states and steps of one contract, in that contract's words; `final` has success first."""

    contract: str
    initial: tuple[str, ...]
    running: tuple[str, ...]
    final: tuple[str, ...]
    steps: Mapping[str, tuple[str, ...]]
    reopen: Mapping[str, tuple[str, ...]] = {}
    walks: tuple[tuple[str, ...], ...] = ()
    """Several steps of the table that one write may make at once, each from first to last state."""
    overtake_ms: int = 0
    """By how much claims that run at the same time may overtake each other; 0: they never do.

    One that dies under way, with its worker or its server, gives back what it had locked."""

    @property
    def states(self) -> tuple[str, ...]:
        """All states, in the order in which the table names them."""
        named = [*self.steps, *(to for targets in self.steps.values() for to in targets)]
        return tuple(dict.fromkeys([*named, *self.final]))

    def allows(self, from_state: str, to_state: str, *, reopening: bool = False) -> bool:
        """Whether the table has this step; reopening a finished job is asked for by name."""
        table = self.reopen if reopening else self.steps
        return to_state in table.get(from_state, ())

    def reaches(self, from_state: str, to_state: str) -> bool:
        """Whether one write may lead there: by one step, or by a walk of several."""
        return self.allows(from_state, to_state) or any(
            (walk[0], walk[-1]) == (from_state, to_state) for walk in self.walks
        )

    def require(self, from_state: str, to_state: str, *, reopening: bool = False) -> None:
        """Raise `InvalidTransition`, naming the steps there are, unless the table has this one."""
        if self.allows(from_state, to_state, reopening=reopening):
            return
        table = self.reopen if reopening else self.steps
        possible = ", ".join(table.get(from_state, ())) or "nothing"
        raise InvalidTransition(
            f"{self.contract}: a job cannot go from {from_state!r} to {to_state!r}; "
            f"from there it can go to {possible}",
            contract=self.contract,
        )


MEMORY = Machine(
    contract="memory",
    initial=("waiting",),
    running=("running",),
    final=("done", "failed", "cancelled"),
    steps={
        "waiting": ("running", "failed", "cancelled"),
        "running": ("waiting", "done", "failed", "cancelled"),
    },
    reopen={"done": ("waiting",), "failed": ("waiting",), "cancelled": ("waiting",)},
)

STREAMS = Machine(
    contract="streams",
    initial=("queued",),
    running=("running",),
    final=("done", "error", "canceled"),
    steps={
        "queued": ("running", "error", "canceled"),
        "running": ("queued", "done", "error", "canceled"),
    },
    reopen={"done": ("queued",), "error": ("queued",), "canceled": ("queued",)},
)

BULLMQ = Machine(
    contract="bullmq",
    initial=("waiting", "prioritized", "delayed", "waiting-children"),
    running=("active",),
    final=("completed", "failed"),
    steps={
        "waiting": ("active", "delayed", "prioritized", "failed"),
        "prioritized": ("active", "delayed", "waiting", "failed"),
        "delayed": ("waiting", "prioritized", "active", "failed"),
        "waiting-children": ("waiting", "prioritized", "delayed", "failed"),
        "active": (
            "completed",
            "failed",
            "waiting",
            "prioritized",
            "delayed",
            "waiting-children",
        ),
    },
    reopen={"completed": ("waiting", "prioritized"), "failed": ("waiting", "prioritized")},
)

OMNIQ = Machine(
    contract="omniq",
    initial=("wait", "delayed"),
    running=("active",),
    final=("completed", "failed"),
    steps={
        "wait": ("active", "failed"),
        "delayed": ("wait", "active", "failed"),
        "active": ("completed", "failed", "delayed", "wait"),
    },
    reopen={"failed": ("wait",)},
)

# What failed rests in FAILED until it is decided; what is cancelled or expires while it waits goes
# there through RUNNING.
PLANE = Machine(
    contract="plane",
    initial=("QUEUED",),
    running=("RUNNING",),
    final=("SUCCEEDED", "DLQ"),
    steps={
        "QUEUED": ("RUNNING", "DLQ"),
        "RUNNING": ("SUCCEEDED", "FAILED", "DLQ", "QUEUED"),
        "FAILED": ("QUEUED", "DLQ"),
    },
    reopen={"SUCCEEDED": ("QUEUED",), "DLQ": ("QUEUED",)},
    walks=(("QUEUED", "RUNNING", "FAILED"),),
    overtake_ms=30_000,  # a message that Redis lost goes out again only after `resend_ms`
)

# `failed` rests: it leads to queued while attempts are left, to dead_letter when none is. A handler
# that names no stages walks through them; what is cancelled or expires while it waits reaches
# `failed` through `claimed`. Reopening begins the job anew, with a new row.
INBOX = Machine(
    contract="inbox",
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
    overtake_ms=10_000,
    walks=(
        ("claimed", "fetching", "processing"),
        ("claimed", "fetching", "processing", "uploading"),
        ("fetching", "processing", "uploading"),
        ("claimed", "fetching", "processing", "uploading", "succeeded"),
        ("fetching", "processing", "uploading", "succeeded"),
        ("processing", "uploading", "succeeded"),
        ("queued", "claimed", "failed"),
    ),
)

MACHINES: Mapping[str, Machine] = {
    machine.contract: machine for machine in (MEMORY, STREAMS, BULLMQ, OMNIQ, PLANE, INBOX)
}
