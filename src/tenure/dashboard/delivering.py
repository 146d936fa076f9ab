"""The outboxes of queues that have one: which events go where, and what came of them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec

from tenure.core.errors import NotFound
from tenure.core.job import JobRecord
from tenure.core.redaction import Redaction
from tenure.core.seam import Ledger, Query
from tenure.dashboard.house import Street
from tenure.dashboard.kinds import kind_of
from tenure.dashboard.reading import decoded, fault_of

CHOICES = (("", "all"), ("waiting", "waiting"), ("done", "delivered"), ("failed", "given up"))
_PAGE = 50


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """An event on its way. `answer` is what the receiver said last, as far as it is kept; `to` is
    without what may be a secret: neither user nor query."""

    event_id: str
    job_id: str
    step: str
    to: str
    state: str
    kind: str
    attempt: int
    max_attempts: int
    created_ms: int
    updated_ms: int
    due_ms: int
    answer: str


class Deliveries(msgspec.Struct, frozen=True):
    """A page of one outbox, newest first."""

    queue: str
    events: list[Delivery]
    after: str


def outboxes(street: Street) -> list[str]:
    """The queues that have one."""
    return [house.name for house in street if house.outbox is not None]


def outbox_of(street: Street, queue: str) -> Ledger:
    """The outbox of a queue."""
    ledger = street[queue].outbox
    if ledger is None:
        raise NotFound(
            f"{queue} has no outbox; these have: {', '.join(outboxes(street)) or 'none'}"
        )
    return ledger


async def deliveries(
    street: Street,
    queue: str,
    redaction: Redaction,
    *,
    kind: str = "",
    after: str = "",
    limit: int = _PAGE,
) -> Deliveries:
    """Events of a queue's outbox, of one kind if asked for."""
    ledger = outbox_of(street, queue)
    counts = await ledger.counts()
    states = tuple(state for state in counts.states if kind_of(state) == kind)
    page = await ledger.find(Query(states=states, after=after, limit=limit))
    return Deliveries(
        queue, [_delivery(await redaction.seen(event)) for event in page.jobs], page.after
    )


def _delivery(event: JobRecord) -> Delivery:
    told = decoded(event.payload)
    return Delivery(
        event_id=event.job_id,
        job_id=event.gid,
        step=str(told.get("status", "")) if isinstance(told, dict) else "",
        to=_address(str(event.extra.get("status_webhook_url", ""))),
        state=event.state,
        kind=kind_of(event.state),
        attempt=event.attempt,
        max_attempts=event.max_attempts,
        created_ms=event.created_ms,
        updated_ms=event.updated_ms,
        due_ms=event.due_ms,
        answer=_answer(event),
    )


def _answer(event: JobRecord) -> str:
    result: Any = decoded(event.result) if event.result else None
    if isinstance(result, dict) and "status" in result:
        took = f", {result['ms']} ms" if "ms" in result else ""
        return f"{result['status']}{took}"
    return fault_of(event.error).message[:200]


def _address(url: str) -> str:
    """Without what may be a secret: neither user nor query.

    >>> _address("https://me:pw@hooks.example:8443/a/b?token=1")
    'https://hooks.example:8443/a/b'
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}" if host else ""
