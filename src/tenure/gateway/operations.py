"""The queues that a gateway serves, and the endpoints that belong to no contract.

These are the list of queues, pause and resume, the audit export, tickets, health and metrics.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import structlog
from msgspec import Meta

from tenure.client.events import FollowedLedger
from tenure.core.endpoint import OPEN, Answer, Call, Endpoint, Handle, Reply, Right, Submits
from tenure.core.errors import ReplyLost, StoreError, StoreUnreachable, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.portable import State, portable_counts
from tenure.core.redaction import Redaction
from tenure.core.registry import (
    contract_of,
    find_contract,
    has_part,
    open_journal,
    open_ledger,
    open_part,
    open_queue,
    parse_url,
)
from tenure.core.seam import Counts
from tenure.dashboard.audit import AuditLog
from tenure.dashboard.queues import OpenQueue, QueueRegistry, gather_available
from tenure.dashboard.views import QueueWarning
from tenure.gateway.feed import Feed
from tenure.gateway.http.resource import Bytes
from tenure.gateway.keys import TICKET_S, Keys
from tenure.gateway.metrics import TEXT, Metrics
from tenure.gateway.problems import Problem
from tenure.gateway.settings import GatewaySettings
from tenure.store.batcher import Batcher, TooManyWaiting
from tenure.store.redis import Redis

_log = structlog.get_logger("tenure.gateway")

_READY_S = 2.0
_READY_CACHE_S = 1.0
_PROBE_CACHE_S = 5.0
_NO_JOB = "readyz"
_SEQ_MAX = 2**53
_PLAIN = "text/plain; charset=utf-8"
_BATCH_JOBS_MAX = 100
_BATCH_BYTES_MAX = 1 << 20
_WAITING_JOBS_MAX = 10_000
_WARNINGS_CACHE_S = 60.0
_Verb: TypeAlias = Literal["pause", "resume"]
_Steer: TypeAlias = Callable[[str, _Verb, str], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayQueue(OpenQueue):
    """One queue of one contract with the feed of its events. `name` is its name in /api/queues."""

    feed: Feed

    def endpoints(self, settings: GatewaySettings, submits: Submits) -> list[Endpoint]:
        """The endpoints of the contract; [] for a contract that has none."""
        contract = find_contract(self.contract)
        if contract is None or contract.routes is None:
            return []
        return contract.routes(
            submits,
            self.ledger,
            self.queue,
            ttl_s=settings.ttl_s,
            redaction=Redaction(settings.redact),
            **settings.route_options,
        )

    def start(self) -> None:
        """Start the feed, and the background tasks of the queue if it has any."""
        self.feed.start()
        if self.queue.features.start is not None:
            self.queue.features.start()

    def drain(self) -> None:
        """End the long polls of workers that wait for a job."""
        if self.queue.features.drain is not None:
            self.queue.features.drain()

    async def close(self) -> None:
        """Stop the feed and close all connections."""
        await self.feed.close()
        await OpenQueue.close(self)  # super() does not work in a dataclass with slots


def open_queues(
    urls: Sequence[str], settings: GatewaySettings, metrics: Metrics
) -> list[GatewayQueue]:
    """Open the queues behind these URLs; they connect on first use."""
    queues = [_open(url, settings, metrics) for url in urls]
    names = [queue.name for queue in queues]
    for name in names:
        if names.count(name) > 1:  # pages and /api could not tell them apart
            raise UsageError(
                f"two queues are called {name!r}; a gateway serves one of them, or queues whose "
                "URLs differ in `queue`"
            )
    return queues


def _open(url: str, settings: GatewaySettings, metrics: Metrics) -> GatewayQueue:
    parsed = parse_url(url)
    ledger, journal = open_ledger(url), open_journal(url)
    feed = Feed(
        FollowedLedger(ledger),
        journal,
        waiter=ledger.features.waiter,
        final=contract_of(parsed).machine.final,
        sweep_ms=settings.sweep_ms,
        heartbeat_ms=settings.heartbeat_ms,
        client_bytes_max=settings.client_bytes_max,
        on_events=metrics.sse_events.inc,
        redaction=Redaction(settings.redact),
    )
    return GatewayQueue(
        name=parsed.name,
        contract=parsed.contract,
        queue=open_queue(url),
        ledger=ledger,
        journal=journal,
        address=parsed.safe,
        outbox=open_part(url, "outbox") if has_part(url, "outbox") else None,
        feed=feed,
    )


class SubmitBatcher:
    """Batches the submits of many clients; one call of the queue runs at a time.

    Requesters take turns, so one that sends many lists does not delay the others. Its jobs that
    wait are limited; the anonymous local caller has no limit. A job whose client disconnects before
    the call is not stored.
    """

    def __init__(self, queue: Submits) -> None:
        self._submits: Batcher[NewJob, Submitted] = Batcher(
            queue.submit,
            items_max=_BATCH_JOBS_MAX,
            size_max=_BATCH_BYTES_MAX,
            measure=lambda job: len(job.payload),
            drops_gone=True,
            caller_of=attrgetter("requester"),
            waiting_max=_WAITING_JOBS_MAX,
        )

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Like the queue's `submit`. After an error it is unknown which of the jobs are stored.

        Raises `Problem` 429 if too many jobs of the requester wait; then none of these is stored.
        """
        try:
            return await self._submits(jobs)
        except TooManyWaiting as error:
            detail = f"{error.weight} jobs of this key wait to be stored, and at most "
            detail += f"{_WAITING_JOBS_MAX} may; wait for their answers"
            raise Problem("rate_limited", detail, retry_after_s=1) from None


class RedisWarnings:
    """Warnings about Redis settings that can lose jobs. The settings are read once a minute."""

    def __init__(self, redis: Redis | None) -> None:
        self._redis = redis
        self._checked_s = float("-inf")
        self._found: list[QueueWarning] = []

    async def __call__(self) -> list[QueueWarning]:
        if self._redis is not None and time.monotonic() - self._checked_s > _WARNINGS_CACHE_S:
            self._checked_s = time.monotonic()
            self._found = await _redis_warnings(self._redis)
        return self._found


async def _redis_warnings(redis: Redis) -> list[QueueWarning]:
    try:
        persistence, memory = await redis.pipeline([("INFO", "persistence"), ("INFO", "memory")])
    except StoreError:
        return []
    found: list[QueueWarning] = []
    if b"aof_enabled:0" in persistence:
        text = "appendonly is off: a crash of the store loses the jobs of the last minutes"
        found.append(QueueWarning("Redis", text, "redis-cli CONFIG SET appendonly yes"))
    if b"maxmemory_policy:" in memory and b"maxmemory_policy:noeviction" not in memory:
        text = "maxmemory-policy lets the store throw jobs away when it is full"
        found.append(
            QueueWarning("Redis", text, "redis-cli CONFIG SET maxmemory-policy noeviction")
        )
    return found


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue and its depths. `states` counts jobs now, by the states that all contracts share.

    `own_states` counts them by the contract's words, and so does `totals`, since the queue exists.
    `away` is true when its store does not answer; all numbers are 0 then.
    """

    name: str
    contract: str
    paused: bool
    workers: int
    oldest_waiting_ms: int
    states: dict[State, int]
    own_states: dict[str, int]
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
    """The range of entries, by their numbers."""

    after: Annotated[int, Meta(ge=0, le=_SEQ_MAX, description="The last number seen.")] = 0
    through: Annotated[int, Meta(ge=0, le=_SEQ_MAX, description="The last number to return.")] = (
        _SEQ_MAX
    )
    limit: Annotated[int, Meta(ge=1, le=10_000, description="How many at most.")] = 10_000


class Readiness:
    """Whether the stores answer and accept writes. Strangers may ask, as often as they like.

    So a check reads one job that does not exist and counts nothing. One check runs at a time for
    all callers, and its answers are used for a second.
    """

    def __init__(self, queues: QueueRegistry) -> None:
        self._queues = queues
        self._check: asyncio.Task[dict[str, str]] | None = None
        self._fresh_until_s = -math.inf
        self._probed_s: dict[str, float] = {}

    async def answers(self) -> dict[str, str]:
        """By the name of each queue "ok", or what is wrong with its store."""
        check = self._check
        if check is None or (check.done() and time.monotonic() > self._fresh_until_s):
            check = self._check = asyncio.create_task(self._ask_all())
        return await asyncio.shield(check)

    async def _ask_all(self) -> dict[str, str]:
        answers = await asyncio.gather(*map(self._ask, self._queues))
        self._fresh_until_s = time.monotonic() + _READY_CACHE_S
        return dict(zip(self._queues.names, answers, strict=True))

    async def _ask(self, queue: OpenQueue) -> str:
        """ "ok" if the store answers and accepts writes. A successful write is cached for 5 s."""
        try:
            async with asyncio.timeout(_READY_S):
                await queue.ledger.get(_NO_JOB)
                if self._probed_s.get(queue.name, -math.inf) > time.monotonic() - _PROBE_CACHE_S:
                    return "ok"
                await queue.ledger.probe()
        except TimeoutError:
            answer = "no answer in time"
        except (StoreUnreachable, ReplyLost) as error:
            reply = str(error.reply or "").partition(" ")[0]
            answer = f"unreachable ({reply})" if reply else "unreachable"
        except StoreError:
            answer = "refuses writes"
        else:
            self._probed_s[queue.name] = time.monotonic()
            return "ok"
        self._probed_s.pop(queue.name, None)
        return answer


class Operations:
    """Handlers over all queues.

    `draining` returns whether the gateway is shutting down. `steer` pauses and resumes queues and
    writes the audit log.
    """

    def __init__(
        self,
        queues: Sequence[OpenQueue],
        ring: Keys,
        metrics: Metrics,
        draining: Callable[[], bool],
        steer: _Steer,
        audit: AuditLog,
    ) -> None:
        self._queues = QueueRegistry(queues)
        self._ring = ring
        self._metrics = metrics
        self._draining = draining
        self._steer = steer
        self._audit = audit
        self._readiness = Readiness(self._queues)

    def endpoints(self) -> list[Endpoint]:
        """The endpoints besides those of contracts and dashboard."""
        ready = {
            200: Reply("Ready.", Ready, also=("text/plain",)),
            503: Reply("Not ready.", Ready, also=("text/plain",)),
        }
        export = Reply("Lines of `seq`, `prev`, `hash`, `entry`.", str, media="text/plain")
        return [
            _endpoint("GET /api/queues", "listQueues", "Depths and totals of every queue",
                      self._list, {200: Reply("The queues.", QueueList)},
                      Right("observe", "all"), "queues", is_search=True),
            self._switch("pause", "Stop handing out jobs; running jobs continue"),
            self._switch("resume", "Hand out jobs again"),
            _endpoint("GET /api/audit/export", "exportAudit",
                      "The audit log with its hashes, one JSON object a line, oldest first",
                      self._export, {200: export}, Right("admin", "all"), "observing",
                      asks=ExportAudit, problems=(422,), is_search=True),
            _endpoint("POST /v1/tickets", "createTicket",
                      "A ticket for one request, for clients that cannot set headers",
                      self._ticket, {201: Reply("The ticket.", Ticket)},
                      Right("jobs:read", "own", does="ticket", audit="never", streams=True),
                      "access",
                      description="A key must not be part of a URL. A ticket may: it is valid for "
                      f"one request that reads, within {TICKET_S} seconds, as `?ticket=`."),
            _endpoint("GET /livez", "live", "Whether the process is alive",
                      self._livez, {200: Reply("Alive.", str, media="text/plain")}, OPEN),
            _endpoint("GET /readyz", "ready",
                      "Whether the gateway can serve: a store answers, not draining",
                      self._readyz, ready, OPEN, asks=ReadyAsks),
            _endpoint("GET /metrics", "metrics", "Metrics for Prometheus",
                      self._exposition, {200: Reply("Metrics.", str, media=TEXT)},
                      Right("metrics", "all"), is_search=True),
        ]  # fmt: skip

    def _switch(self, verb: _Verb, summary: str) -> Endpoint:
        async def handle(call: Call) -> Answer:
            queue = self._queues[call.path["queue"]]
            await self._steer(call.caller.who, verb, queue.name)
            return Answer(200, _view(queue, await queue.ledger.counts()))

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
        query: ExportAudit = call.query
        lines = [
            link.line
            async for link in self._audit.links()
            if query.after < link.seq <= query.through
        ]
        return Answer(200, Bytes(b"".join(lines[: query.limit]), _PLAIN))

    async def _ticket(self, call: Call) -> Answer:
        return Answer(201, Ticket(await self._ring.issue(call.caller), TICKET_S))

    async def _livez(self, call: Call) -> Answer:
        return Answer(200, Bytes(b"ok\n", _PLAIN))

    async def _readyz(self, call: Call) -> Answer:
        """Ready: not draining, and at least one store accepts writes. `checks` has each result."""
        for queue in self._queues:
            self._note_quarantined(queue)
        stores = await self._readiness.answers()
        answers = set(stores.values())
        draining = self._draining()
        checks = {"draining": "draining" if draining else "ok"}
        checks |= {f"store:{name}": answer for name, answer in stores.items()}
        ready = not draining and "ok" in answers
        word = "not ready" if not ready else "ready" if answers == {"ok"} else "degraded"
        status = 200 if ready else 503
        if call.query.verbose is not None:
            signs = {name: "+" if answer == "ok" else "-" for name, answer in checks.items()}
            lines = [f"[{signs[name]}] {name} {answer}" for name, answer in checks.items()]
            return Answer(status, Bytes("\n".join([*lines, word, ""]).encode(), _PLAIN))
        return Answer(status, Ready(word, checks), () if ready else (("retry-after", "2"),))

    async def _exposition(self, call: Call) -> Answer:
        """A store that does not answer is a metric (`tenure_store_up` 0), not an error."""
        for queue in self._queues:
            self._note_quarantined(queue)
            try:
                async with asyncio.timeout(_READY_S):
                    self._metrics.observe(queue.name, queue.contract, await queue.ledger.counts())
            except (StoreError, TimeoutError):
                self._metrics.observe(queue.name, queue.contract, None)
        page, media = self._metrics.page(call.headers.get("accept", ""))
        return Answer(200, Bytes(page, media))

    def _note_quarantined(self, queue: OpenQueue) -> None:
        """Log and count the records that a queue has quarantined since the last call."""
        take = queue.queue.features.take_quarantined
        for record in take() if take is not None else ():
            self._metrics.quarantined.labels(queue.name).inc()
            _log.warning(
                "record_quarantined", queue=queue.name, job_id=record.job_id, reason=record.reason
            )


def _view(queue: OpenQueue, counts: Counts | None) -> QueueView:
    now = counts or Counts({})
    return QueueView(
        name=queue.name,
        contract=queue.contract,
        paused=now.paused,
        workers=now.workers,
        oldest_waiting_ms=now.oldest_waiting_ms,
        states=portable_counts(queue.contract, now.states),
        own_states=now.states,
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
