"""The options of `inbox+sqlite://` and `inbox+postgresql://` URLs."""

from __future__ import annotations

from typing import Literal

import msgspec

from tenure.core.errors import UsageError
from tenure.core.registry import check_least
from tenure.sql.engine import INBOX, OUTBOX, QueueSettings, SqlOptions

_CONTRACT = "inbox"

# Contract section 12.
_OUTBOX_BATCH = 10
_OUTBOX_BATCH_MAX = 25


class Options(SqlOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the queue URL; the defaults are for work that must not be lost.

    `box=outbox` opens the second queue, of events to be delivered. `queue` names one of several
    inboxes of a database. `batch` is how many events one claim of an outbox takes, `at_once` how
    many jobs of this queue one worker holds (0: as many as it has slots). `share` is how many jobs
    of one requester a worker of an inbox holds at once, `requester_max` how many all workers do,
    unless the requester's key has a quota; `share=0` switches both off. `keep_credentials` keeps
    the sealed credentials of ended jobs, so that dead letters can be retried with them; without it
    the step that ends a job removes them.
    """

    queue: str = "inbox"
    box: Literal["inbox", "outbox"] = "inbox"
    batch: int = _OUTBOX_BATCH
    at_once: int = 0
    share: int = 0
    requester_max: int = 0
    keep_credentials: bool = False

    def __post_init__(self) -> None:
        self.check(_CONTRACT)
        if not 1 <= self.batch <= _OUTBOX_BATCH_MAX:
            raise UsageError(
                f"batch: 1 to {_OUTBOX_BATCH_MAX} events, not {self.batch}", contract=_CONTRACT
            )
        check_least(self, _CONTRACT, at_once=0, share=0, requester_max=0)
        if not self.queue or len(self.queue) > 100 or not self.queue.isprintable():
            raise UsageError("queue: 1 to 100 printable characters", contract=_CONTRACT)

    def settings(self) -> QueueSettings:
        """The settings of the queue."""
        if self.box == "outbox":
            return self.of_table(contract=_CONTRACT, table=OUTBOX, queue=f"{self.queue}/outbox")
        made = self.of_table(contract=_CONTRACT, table=INBOX, queue=self.queue)
        own = ("keep_credentials", "share", "requester_max")
        return msgspec.structs.replace(made, **{name: getattr(self, name) for name in own})
