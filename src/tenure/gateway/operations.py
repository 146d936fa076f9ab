"""Endpoints that belong to no contract: queues, tickets, health, metrics."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import structlog
from msgspec import Meta

from tenure.core.endpoint import OPEN, Answer, Call, Endpoint, Handle, Reply, Right
from tenure.core.errors import ReplyLost, StoreError, StoreUnreachable
from tenure.core.seam import Counts, Probed, Quarantining
from tenure.dashboard.audit import AuditLog
from tenure.dashboard.queues import OpenQueue, QueueRegistry, gather_available
from tenure.gateway.dispatch import Bytes
from tenure.gateway.keys import TICKET_S, Keys
from tenure.gateway.metrics import TEXT, Metrics

_log = structlog.get_logger("tenure.gateway")

_READY_S = 2.0
_PROBE_CACHE_S = 5.0
_SEQ_MAX = 2**53
_PLAIN = "text/plain; charset=utf-8"
_Verb: TypeAlias = Literal["pause", "resume"]
Steer: TypeAlias = Callable[[str, _Verb, str], Awaitable[None]]


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
    """Handlers over all queues.

    `draining` tells whether the gateway is shutting down. `steer` pauses and resumes queues and
    writes the audit log.
    """

    def __init__(
        self,
        queues: Sequence[OpenQueue],
        ring: Keys,
        metrics: Metrics,
        draining: Callable[[], bool],
        steer: Steer,
        audit: AuditLog,
    ) -> None:
        self._queues = QueueRegistry(queues)
        self._ring = ring
        self._metrics = metrics
        self._draining = draining
        self._steer = steer
        self._audit = audit
        self._probed_s: dict[str, float] = {}

    def endpoints(self) -> list[Endpoint]:
        """What the gateway serves besides its contracts."""
        ready = {
            200: Reply("Ready.", Ready, also=("text/plain",)),
            503: Reply("Not ready.", Ready, also=("text/plain",)),
        }
        export = Reply("Lines of `seq`, `prev`, `hash`, `entry`.", str, media="text/plain")
        return [
            _endpoint("GET /api/queues", "listQueues", "Depths and totals of every queue",
                      self._list, {200: Reply("The queues.", QueueList)},
                      Right("observe", "all"), "queues"),
            self._switch("pause", "Stop handing out jobs; what runs goes on"),
            self._switch("resume", "Hand out jobs again"),
            _endpoint("GET /api/audit/export", "exportAudit",
                      "The audit log with its hashes, one JSON object a line, oldest first",
                      self._export, {200: export}, Right("admin", "all"), "observing",
                      asks=ExportAudit, problems=(422,)),
            _endpoint("POST /v1/tickets", "createTicket",
                      "A ticket for one request, for clients that cannot set headers",
                      self._ticket, {201: Reply("The ticket.", Ticket)},
                      Right("jobs:read", "own", does="ticket", audit="never", streams=True),
                      "access",
                      description="A key never belongs in a URL. A ticket does: it is good for "
                      f"one request that reads, within {TICKET_S} seconds, as `?ticket=`."),
            _endpoint("GET /livez", "live", "Whether the process is alive",
                      self._livez, {200: Reply("Alive.", str, media="text/plain")}, OPEN),
            _endpoint("GET /readyz", "ready",
                      "Whether the gateway can serve: a store answers, not draining",
                      self._readyz, ready, OPEN, asks=ReadyAsks),
            _endpoint("GET /metrics", "metrics", "Metrics for Prometheus",
                      self._exposition, {200: Reply("Metrics.", str, media=TEXT)},
                      Right("metrics", "all")),
        ]  # fmt: skip

    def _switch(self, verb: _Verb, summary: str) -> Endpoint:
        async def handle(call: Call) -> Answer:
            served = self._queues[call.path["queue"]]
            await self._steer(call.caller.who, verb, served.name)
            return Answer(200, _view(served, await served.ledger.counts()))

        return _endpoint(
            f"POST /api/queues/{{queue}}/{verb}",
            f"{verb}Queue",
            summary,
            handle,
            {200: Reply("The queue as it is now.", QueueView)},
            Right("admin", "all", does=verb, audit="handler"),
            "queues",
            problems=(404,),
        )

    async def _list(self, call: Call) -> Answer:
        counts = await gather_available(each.ledger.counts() for each in self._queues)
        views = [_view(each, now) for each, now in zip(self._queues, counts, strict=True)]
        return Answer(200, QueueList(views))

    async def _export(self, call: Call) -> Answer:
        asked: ExportAudit = call.query
        lines = [
            link.line
            async for link in self._audit.links()
            if asked.after < link.seq <= asked.through
        ]
        return Answer(200, Bytes(b"".join(lines[: asked.limit]), _PLAIN))

    async def _ticket(self, call: Call) -> Answer:
        return Answer(201, Ticket(await self._ring.issue(call.caller), TICKET_S))

    async def _livez(self, call: Call) -> Answer:
        return Answer(200, Bytes(b"ok\n", _PLAIN))

    async def _readyz(self, call: Call) -> Answer:
        """Ready means: not draining, and a store takes writes; `checks` names those that do not."""
        for served in self._queues:
            self._note_quarantined(served)
        answers = await asyncio.gather(*map(self._check_store, self._queues))
        draining = self._draining()
        stores = dict(zip(self._queues.names, answers, strict=True))
        checks = {"draining": "draining" if draining else "ok"}
        checks |= {f"store:{name}": answer for name, answer in stores.items()}
        ready = not draining and "ok" in answers
        word = "not ready" if not ready else "ready" if set(answers) == {"ok"} else "degraded"
        status = 200 if ready else 503
        if call.query.verbose is not None:
            signs = {name: "+" if answer == "ok" else "-" for name, answer in checks.items()}
            lines = [f"[{signs[name]}] {name} {answer}" for name, answer in checks.items()]
            return Answer(status, Bytes("\n".join([*lines, word, ""]).encode(), _PLAIN))
        return Answer(status, Ready(word, checks), () if ready else (("retry-after", "2"),))

    async def _check_store(self, served: OpenQueue) -> str:
        """ "ok" if the store answers and takes writes. A successful write is cached for a while."""
        try:
            async with asyncio.timeout(_READY_S):
                await served.ledger.counts()
                if self._probed_s.get(served.name, -math.inf) > time.monotonic() - _PROBE_CACHE_S:
                    return "ok"
                if isinstance(served.ledger, Probed):
                    await served.ledger.probe()
        except TimeoutError:
            answer = "no answer in time"
        except (StoreUnreachable, ReplyLost) as error:
            reply = str(error.reply or "").partition(" ")[0]
            answer = f"unreachable ({reply})" if reply else "unreachable"
        except StoreError:
            answer = "refuses writes"
        else:
            self._probed_s[served.name] = time.monotonic()
            return "ok"
        self._probed_s.pop(served.name, None)
        return answer

    async def _exposition(self, call: Call) -> Answer:
        """A store that is away is a metric, not an error."""
        for served in self._queues:
            self._note_quarantined(served)
            try:
                async with asyncio.timeout(_READY_S):
                    self._metrics.observe(served.name, await served.ledger.counts())
            except (StoreError, TimeoutError):
                self._metrics.observe(served.name, None)
        page, media = self._metrics.page(call.headers.get("accept", ""))
        return Answer(200, Bytes(page, media))

    def _note_quarantined(self, served: OpenQueue) -> None:
        """Log and count the records that a queue set aside in this process since the last look."""
        if not isinstance(served.queue, Quarantining):
            return
        for record in served.queue.take_quarantined():
            self._metrics.quarantined.labels(served.name).inc()
            _log.warning(
                "record_quarantined", queue=served.name, job_id=record.job_id, reason=record.reason
            )


def _view(served: OpenQueue, counts: Counts | None) -> QueueView:
    now = counts or Counts({})
    return QueueView(
        name=served.name,
        contract=served.contract,
        paused=now.paused,
        workers=now.workers,
        oldest_waiting_ms=now.oldest_waiting_ms,
        states=now.states,
        totals=now.totals,
        away=counts is None,
    )


def _endpoint(
    route: str,
    operation: str,
    summary: str,
    handle: Handle,
    replies: dict[int, Reply],
    right: Right,
    tag: str = "health",
    **more: Any,
) -> Endpoint:
    method, path = route.split()
    return Endpoint(
        method=method,
        path=path,
        operation=operation,
        summary=summary,
        handle=handle,
        replies=replies,
        right=right,
        tag=tag,
        **more,
    )
