"""/api for the outboxes of queues that have one: which events go where, and sending them again."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tenure.core.endpoint import Answer, Call, Endpoint, Reply, Right
from tenure.core.redaction import Redaction
from tenure.dashboard.acting import Actor
from tenure.dashboard.delivering import Deliveries, deliveries, outboxes
from tenure.dashboard.house import Street
from tenure.dashboard.shapes import ActionAnswers

_EventId = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]


class ReadOutbox(msgspec.Struct, frozen=True):
    """Query of the events."""

    kind: Annotated[
        Literal["", "waiting", "done", "failed"],
        Meta(description="Only those on their way, delivered, or given up."),
    ] = ""
    after: Annotated[
        str, Meta(pattern="^[0-9]{0,18}$", description="The `after` of the page before.")
    ] = ""
    limit: Annotated[int, Meta(ge=1, le=500, description="How many at most.")] = 50


class RedeliverBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events by id."""

    event_ids: Annotated[list[_EventId], Meta(min_length=1, max_length=500)]


class OutboxList(msgspec.Struct, frozen=True):
    """The queues that have an outbox."""

    queues: list[str]


class OutboxApi:
    """The endpoints."""

    def __init__(self, street: Street, actor: Actor, redaction: Redaction) -> None:
        self._redaction = redaction
        self._street = street
        self._actor = actor

    async def names(self, call: Call) -> Answer:
        """Which queues have one."""
        return Answer(200, OutboxList(outboxes(self._street)))

    async def read(self, call: Call) -> Answer:
        """Events of one."""
        asked: ReadOutbox = call.query
        return Answer(
            200,
            await deliveries(
                self._street,
                call.path["queue"],
                self._redaction,
                kind=asked.kind,
                after=asked.after,
                limit=asked.limit,
            ),
        )

    async def redeliver(self, call: Call) -> Answer:
        """Send events again."""
        ids: RedeliverBody = call.body
        who, queue = call.caller.who, call.path["queue"]
        event_ids = list(dict.fromkeys(ids.event_ids))
        answers = await self._actor.redeliver(who, queue, event_ids)
        return Answer(200, ActionAnswers(dict(zip(event_ids, answers, strict=True))))

    def endpoints(self) -> list[Endpoint]:
        """All of them."""
        return [
            Endpoint(
                method="GET",
                path="/api/outboxes",
                operation="listOutboxes",
                summary="The queues that have an outbox",
                right=Right("observe", "all"),
                handle=self.names,
                replies={200: Reply("As it is now.", OutboxList)},
                tag="observing",
            ),
            Endpoint(
                method="GET",
                path="/api/queues/{queue}/outbox",
                operation="readOutbox",
                summary="Events of a queue's outbox and what came of them, newest first",
                right=Right("observe", "all"),
                handle=self.read,
                asks=ReadOutbox,
                replies={200: Reply("As it is now.", Deliveries)},
                problems=(404, 422),
                tag="observing",
            ),
            Endpoint(
                method="POST",
                path="/api/queues/{queue}/outbox/redeliver",
                operation="redeliver",
                summary="Send events again that were delivered or given up, under the same ids",
                right=Right("admin", "all", does="redeliver", audit="handler"),
                handle=self.redeliver,
                takes=RedeliverBody,
                example={"event_ids": ["0190f5a2-8b3c-7def-8123-456789abcdef.3"]},
                replies={200: Reply("What became of each.", ActionAnswers)},
                problems=(400, 404, 413, 415, 422),
                tag="steering",
            ),
        ]
