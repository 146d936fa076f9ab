"""The journal: one event schema for the history of every contract.

Each event says what its writer saw (`from_state`, `prev_fence`, `prev_lease_until_ms`) and what it
left (`to_state`, `fence`, `lease_until_ms`), so that the unbroken chain of a job's history can be
checked by one aggregation that needs no order. It carries no payload and no secret.
"""

from __future__ import annotations

import msgspec

EVENT_TYPES = (
    "submit",  # the job is stored and waits
    "promote",  # its time came, or an operator brought it forward: it waits for a worker now
    "claim",  # a lease was taken; attempt and fence rose
    "extend",  # the holder kept its lease
    "report",  # news from the holder
    "complete",  # accepted results
    "fail",  # failed, and what becomes of it is decided next
    "retry",  # failed, waits again
    "bury",  # failed for good
    "snooze",  # put back by its handler, attempt not counted
    "release",  # put back by its worker, attempt not counted
    "reap",  # the lease ran out and was taken away
    "cancel",  # ended on request
    "expire",  # it outlived its time to live before it ran
    "reopen",  # an operator sent a finished job back: a new epoch
    "remove",  # an operator deleted it
    "reject",  # the write of a stale holder was refused; nothing changed
    "pause",  # of the queue, not of a job: no more claims
    "resume",  # of the queue: claims again
)


class JournalEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One transition, in store order by `seq`; `ver` counts 1, 2, 3 ... within the job.

    `ver` 0 marks an event that changed no job (`reject`, `pause`, `resume`). Zero and "" mean
    "not applicable".
    """

    seq: str
    contract: str
    queue: str
    job_id: str
    type: str
    ts_ms: int
    ver: int = 0
    task: str = ""
    from_state: str = ""
    to_state: str = ""
    attempt: int = 0
    fence: int = 0
    prev_fence: int = 0
    token_h: str = ""
    worker_id: str = ""
    lease_until_ms: int = 0
    prev_lease_until_ms: int = 0
    event_id: str = ""
    gid: str = ""
    priority: int = 0
    due_ms: int = 0
    max_attempts: int = 0
    error_code: str = ""
    payload_h: str = ""
    result_h: str = ""
    data: str = ""
