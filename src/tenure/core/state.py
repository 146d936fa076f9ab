"""State machines as data. Each contract declares its own in its folder.

The table alone decides whether a job may go from one state to another. A step that is not in the
table raises `InvalidTransition`. The property tests and the diagrams in the documentation are made
from the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tenure.core.errors import InvalidTransition

Kind = Literal["waiting", "running", "done", "failed", "cancelled"]
"""What the states of all contracts have in common."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The states and steps of one contract, in that contract's words.

    A job waits in an `initial` state. `final` begins with success. A step out of a `final` state
    exists only where an operator may send a finished job back, and is listed under `reopen`.
    """

    contract: str
    initial: tuple[str, ...]
    running: tuple[str, ...]
    final: tuple[str, ...]
    steps: Mapping[str, tuple[str, ...]]
    reopen: Mapping[str, tuple[str, ...]] = {}
    cancelled: tuple[str, ...] = ()
    """Final states of jobs that ended on request."""
    combined_steps: tuple[tuple[str, ...], ...] = ()
    """Paths of several steps that one write may make at once: all states, from first to last."""
    order_slack_ms: int = 0
    """How far claim order may differ from submit order, because a crashed claim returns its locked
    jobs. 0: not at all."""

    @property
    def states(self) -> tuple[str, ...]:
        """All states, in the order in which the table names them."""
        named = [*self.steps, *(to for targets in self.steps.values() for to in targets)]
        return tuple(dict.fromkeys([*named, *self.final]))

    def kind(self, state: str) -> Kind:
        """The common kind of a state of this table."""
        if state in self.initial:
            return "waiting"
        if state in self.running:
            return "running"
        if state == self.final[0]:
            return "done"
        return "cancelled" if state in self.cancelled else "failed"

    def allows(self, from_state: str, to_state: str, *, reopening: bool = False) -> bool:
        """Whether the table has this step; `reopening` looks in `reopen` instead of `steps`."""
        table = self.reopen if reopening else self.steps
        return to_state in table.get(from_state, ())

    def reaches(self, from_state: str, to_state: str) -> bool:
        """Whether one write may lead there: by one step, or by several that it combines."""
        return self.allows(from_state, to_state) or any(
            (path[0], path[-1]) == (from_state, to_state) for path in self.combined_steps
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
