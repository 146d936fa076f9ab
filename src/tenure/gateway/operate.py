"""Endpoints that belong to no contract: queues, tickets, health, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
import structlog
from msgspec import Meta

from tenure.core.endpoint import OPEN, Answer, Call, Endpoint, Reply, Right
from tenure.core.errors import NotFound, ReplyLost, StoreError, StoreUnreachable
from tenure.core.seam import Counts, Probed, Quarantining
from tenure.dashboard.audit import AuditLog
from tenure.dashboard.house import that_answer
from tenure.gateway.dispatch import Bytes
from tenure.gateway.keys import TICKET_S, Keys
from tenure.gateway.metrics import TEXT, Metrics
from tenure.gateway.served import Served

log = structlog.get_logger("tenure.gateway")

_READY_S = 2.0
_BELIEVE_S = 5.0
_SEQ_MAX = 2**53
Steer: TypeAlias = Callable[[str, Literal["pause", "resume"], str], Awaitable[None]]


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue and its depths. `states` counts jobs now, `totals` since the queue exists.

    `away` tells that its store does not answer; the numbers are then all 0.
    """

    name: str
    contract: str
    paused: bool
    workers: int
    oldest_waiting_ms: int
    states: dict[str, int]
    totals: dict[str, int]
    away: bool = False


class QueueList(msgspec.Struct, frozen=True):
    """All queues of this gateway."""

    queues: list[QueueView]


class Ticket(msgspec.Struct, frozen=True):
    """A ticket for one request that reads, within `expires_in_s` seconds, as `?ticket=`."""

    ticket: str
    expires_in_s: int


class Ready(msgspec.Struct, frozen=True):
    """Whether this gateway can serve (`ready`, `degraded`, `not ready`), and what each check said.

    `degraded` serves: the queues whose stores answer; the checks name the others.
    """

    status: str
    checks: dict[str, str]


class ReadyAsks(msgspec.Struct, frozen=True):
    """`?verbose` names the checks in plain text, one a line."""

    verbose: Annotated[str | None, Meta(description="Plain text, one check a line.")] = None


class ExportAudit(msgspec.Struct, frozen=True):
    """Which entries, by their numbers."""

    after: Annotated[int, Meta(ge=0, le=_SEQ_MAX, description="The last number seen.")] = 0
    through: Annotated[int, Meta(ge=0, le=_SEQ_MAX, description="The last wanted.")] = _SEQ_MAX
    limit: Annotated[int, Meta(ge=1, le=10_000, description="How many at most.")] = 10_000


class Operations:
    """Handlers over all served queues.

    `draining` tells whether the gateway is on its way out; `steer` pauses and resumes, and writes
    down who did.
    """

    def __init__(
        self,
        served: Sequence[Served],
        ring: Keys,
        metrics: Metrics,
        draining: Callable[[], bool],
        steer: Steer,
        audit: AuditLog,
    ) -> None:
        self._served = {each.name: each for each in served}
        self._ring = ring
        self._metrics = metrics
        self._draining = draining
        self._steer = steer
        self._audit = audit
        self._probed: dict[str, float] = {}

    async def queues(self, call: Call) -> Answer:
        """Depths of every queue."""
        return Answer(200, QueueList(await self.views()))

    async def views(self) -> list[QueueView]:
        """All queues as they are now; an error where no store answers."""
        served = list(self._served.values())
        counts = await that_answer(each.ledger.counts() for each in served)
        return [
            view(each, Counts({}) if now is None else now, away=now is None)
            for each, now in zip(served, counts, strict=True)
        ]

    async def pause(self, call: Call) -> Answer:
        """Stop handing out leases."""
        served = self._named(call)
        await self._steer(call.caller.who, "pause", served.name)
        return Answer(200, view(served, await served.ledger.counts()))

    async def resume(self, call: Call) -> Answer:
        """Hand out leases again."""
        served = self._named(call)
        await self._steer(call.caller.who, "resume", served.name)
        return Answer(200, view(served, await served.ledger.counts()))

    async def export(self, call: Call) -> Answer:
        """The audit log as it is stored, for a check or a copy elsewhere."""
        asked: ExportAudit = call.query
        lines = [
            link.line
            async for link in self._audit.links()
            if link.seq > asked.after and link.seq <= asked.through
        ]
        return Answer(200, Bytes(b"".join(lines[: asked.limit]), "text/plain; charset=utf-8"))

    async def ticket(self, call: Call) -> Answer:
        """A ticket for the caller; it may read what the caller may."""
        return Answer(201, Ticket(await self._ring.issue(call.caller), TICKET_S))

    async def livez(self, call: Call) -> Answer:
        """The event loop runs, or this would not answer."""
        return Answer(200, Bytes(b"ok\n", "text/plain; charset=utf-8"))

    async def readyz(self, call: Call) -> Answer:
        """Ready means: not draining, and a store takes writes; `checks` names those that do not."""
        served = list(self._served.values())
        for each in served:
            self._note_quarantined(each)
        said = await asyncio.gather(*map(self._store_check, served))
        stores = {f"store:{each.name}": word for each, word in zip(served, said, strict=True)}
        draining = self._draining()
        checks = {"draining": "draining" if draining else "ok", **stores}
        good = not draining and "ok" in said
        all_good = good and set(said) == {"ok"}
        word = "ready" if all_good else "degraded" if good else "not ready"
        status = 200 if good else 503
        if call.query.verbose is not None:
            lines = [
                f"[{'+' if said == 'ok' else '-'}] {name} {said}" for name, said in checks.items()
            ]
            text = "\n".join([*lines, word, ""])
            return Answer(status, Bytes(text.encode(), "text/plain; charset=utf-8"))
        headers = () if good else (("retry-after", "2"),)
        return Answer(status, Ready(word, checks), headers)

    async def _store_check(self, served: Served) -> str:
        """Whether the store answers and takes writes; that it does is believed for a while."""
        try:
            async with asyncio.timeout(_READY_S):
                await served.ledger.counts()
                if self._probed.get(served.name, -_BELIEVE_S) + _BELIEVE_S > time.monotonic():
                    return "ok"
                if isinstance(served.ledger, Probed):
                    await served.ledger.probe()
        except TimeoutError:
            said = "no answer in time"
        except (StoreUnreachable, ReplyLost) as error:
            reply = str(error.reply or "").partition(" ")[0]
            said = f"unreachable ({reply})" if reply else "unreachable"
        except StoreError:
            said = "refuses writes"
        else:
            self._probed[served.name] = time.monotonic()
            return "ok"
        self._probed.pop(served.name, None)
        return said

    async def metrics(self, call: Call) -> Answer:
        """For Prometheus. A store that is away is a metric, not an error."""
        for served in self._served.values():
            self._note_quarantined(served)
            try:
                async with asyncio.timeout(_READY_S):
                    self._metrics.observe(served.name, await served.ledger.counts())
            except (StoreError, TimeoutError):
                self._metrics.observe(served.name, None)
        page, media = self._metrics.page(call.headers.get("accept", ""))
        return Answer(200, Bytes(page, media))

    def _note_quarantined(self, served: Served) -> None:
        """Log and count the records that a queue set aside in this process since the last look."""
        if not isinstance(served.queue, Quarantining):
            return
        for record in served.queue.take_quarantined():
            self._metrics.quarantined.labels(served.name).inc()
            log.warning(
                "record_quarantined", queue=served.name, job_id=record.job_id, reason=record.reason
            )

    def _named(self, call: Call) -> Served:
        served = self._served.get(call.path["queue"])
        if served is None:
            names = ", ".join(self._served)
            raise NotFound(f"there is no such queue; this gateway serves {names}")
        return served

    def endpoints(self) -> list[Endpoint]:
        """What the gateway serves besides its contracts."""
        return [*self._steering(), *self._health()]

    def _steering(self) -> list[Endpoint]:
        return [
            Endpoint(
                method="GET",
                path="/api/queues",
                operation="listQueues",
                summary="Depths and totals of every queue",
                right=Right("observe", "all"),
                handle=self.queues,
                replies={200: Reply("The queues.", QueueList)},
                tag="queues",
            ),
            self._switch("pause", "Stop handing out jobs; what runs goes on", self.pause),
            self._switch("resume", "Hand out jobs again", self.resume),
            Endpoint(
                method="GET",
                path="/api/audit/export",
                operation="exportAudit",
                summary="The audit log with its hashes, one JSON object a line, oldest first",
                right=Right("admin", "all"),
                handle=self.export,
                asks=ExportAudit,
                replies={
                    200: Reply("Lines of `seq`, `prev`, `hash`, `entry`.", str, media="text/plain")
                },
                problems=(422,),
                tag="observing",
            ),
            Endpoint(
                method="POST",
                path="/v1/tickets",
                operation="createTicket",
                summary="A ticket for one request, for clients that cannot set headers",
                description="A key never belongs in a URL. A ticket does: it is good for one "
                f"request that reads, within {TICKET_S} seconds, as `?ticket=`.",
                right=Right("jobs:read", "own", does="ticket", audit="never", streams=True),
                handle=self.ticket,
                replies={201: Reply("The ticket.", Ticket)},
                tag="access",
            ),
        ]

    def _switch(self, verb: str, summary: str, handle: Callable[[Call], object]) -> Endpoint:
        return Endpoint(
            method="POST",
            path=f"/api/queues/{{queue}}/{verb}",
            operation=f"{verb}Queue",
            summary=summary,
            right=Right("admin", "all", does=verb, audit="handler"),
            handle=handle,  # type: ignore[arg-type]
            replies={200: Reply("The queue as it is now.", QueueView)},
            problems=(404,),
            tag="queues",
        )

    def _health(self) -> list[Endpoint]:
        plain = "text/plain"
        return [
            Endpoint(
                method="GET",
                path="/livez",
                operation="live",
                summary="Whether the process is alive",
                right=OPEN,
                handle=self.livez,
                replies={200: Reply("Alive.", str, media=plain)},
                tag="health",
            ),
            Endpoint(
                method="GET",
                path="/readyz",
                operation="ready",
                summary="Whether the gateway can serve: a store answers, not draining",
                right=OPEN,
                handle=self.readyz,
                asks=ReadyAsks,
                replies={
                    200: Reply("Ready.", Ready, also=(plain,)),
                    503: Reply("Not ready.", Ready, also=(plain,)),
                },
                tag="health",
            ),
            Endpoint(
                method="GET",
                path="/metrics",
                operation="metrics",
                summary="Metrics for Prometheus",
                right=Right("metrics", "all"),
                handle=self.metrics,
                replies={200: Reply("Metrics.", str, media=TEXT)},
                tag="health",
            ),
        ]


def view(served: Served, counts: Counts, *, away: bool = False) -> QueueView:
    """A queue as the API shows it."""
    return QueueView(
        name=served.name,
        contract=served.contract,
        paused=counts.paused,
        workers=counts.workers,
        oldest_waiting_ms=counts.oldest_waiting_ms,
        states=counts.states,
        totals=counts.totals,
        away=away,
    )
