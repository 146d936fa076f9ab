"""The producing side, as a BullMQ user knows it: add, add_bulk, flows, schedulers, rate limit.

    producer = open_producer("bullmq+redis://localhost:6379/0?queue=mail")
    job_id = await producer.add("welcome", {"to": "ada"}, attempts=3, backoff=1000)

Options are BullMQ's, by their own names or in Python's spelling. An add whose answer is lost is
sent again under the same request id, so that it is stored once.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tenure.contracts.bullmq import job_options, submission
from tenure.contracts.bullmq.events import QueueEvents
from tenure.contracts.bullmq.family import Flow
from tenure.contracts.bullmq.options import CONTRACT, Options, keys
from tenure.contracts.bullmq.scheduling import Scheduler
from tenure.contracts.bullmq.schema import check as check_schema
from tenure.contracts.bullmq.scripts import SCRIPTS, Scripts
from tenure.core.encoding import to_json
from tenure.core.errors import Conflict, InvalidJob, QueueFull, ServerError
from tenure.core.job import new_job_id
from tenure.core.registry import parse_url
from tenure.store.redis import Arg, Redis
from tenure.store.resending import part, resend

_BATCH_MAX = 500
_TRIES_MAX = 5
_PATIENCE_S = 10.0
_FOREVER = 9_007_199_254_740_991


class Producer:
    """Adds jobs to one queue, for one event loop. `schema` checks payloads before they are sent."""

    def __init__(
        self, redis: Redis, options: Options, *, schema: Mapping[str, Any] | None = None
    ) -> None:
        self._redis = redis
        self._options = options
        self._keys = keys(options.key_prefix)
        self._schema = schema
        self._scheduler = Scheduler(redis, Scripts(redis, options))

    async def add(self, name: str, data: Any = None, **options: Any) -> str:
        """Store one job; returns its id, or the id of the job it duplicates."""
        (job_id,) = await self.add_bulk([(name, data, options)])
        return job_id

    async def add_bulk(self, jobs: Iterable[tuple[str, Any, Mapping[str, Any]]]) -> list[str]:
        """Store many jobs; each batch of five hundred is stored whole or not at all."""
        rows = [self._row(name, data, options) for name, data, options in jobs]
        ids: list[str] = []
        for start in range(0, len(rows), _BATCH_MAX):
            args = [arg for row in rows[start : start + _BATCH_MAX] for arg in row]
            ids += await part(start, self._send(args))
        return ids

    async def add_flow(self, flow: Flow) -> str:
        """Store a tree of jobs in one transaction; the root runs when its children are done."""
        (root,) = await self._add_flows([flow], None)
        return root

    async def add_children(self, job_id: str, flows: Sequence[Flow]) -> list[str]:
        """Give a job of this queue children, each with its own if it has any, in one transaction.

        Its handler calls this while it runs, and raises `Park` to wait for them.
        """
        parent = {"id": job_id, "queue": self._options.key_prefix[:-1]}
        return await self._add_flows(flows, parent)

    async def upsert_scheduler(
        self,
        scheduler_id: str,
        *,
        every: int | None = None,
        pattern: str | None = None,
        name: str = "",
        data: Any = None,
        options: Mapping[str, Any] | None = None,
        **repeat: Any,
    ) -> str:
        """Make jobs `every` so many ms or by a cron `pattern`; further words: tz, limit, offset,
        startDate, endDate. Returns the id of the next job."""
        given = job_options.spelled(options or {})
        packed = {job_options.SHORT.get(word, word): value for word, value in given.items()}
        return await self._scheduler.upsert(
            scheduler_id,
            {"every": every, "pattern": pattern, **repeat},
            name=name or scheduler_id,
            data=to_json(data) if data is not None else b"",
            opts=to_json(packed),
        )

    async def remove_scheduler(self, scheduler_id: str) -> bool:
        """Stop a scheduler; False when there is none."""
        return await self._scheduler.remove(scheduler_id)

    async def rate_limit(self, for_ms: int) -> None:
        """Hand out no job of a rate limited queue for so long; a handler that was told to slow down
        calls this and raises `Snooze(0)`."""
        await self._redis.call("SET", self._keys[9], _FOREVER, "PX", for_ms)

    async def limit(
        self, *, concurrency: int | None = None, rate: tuple[int, int] | None = None
    ) -> None:
        """Bound all workers of the queue together; None takes a bound away. `rate`: (jobs, ms)."""
        meta = self._keys[5]
        commands: list[tuple[Arg, ...]] = [("HDEL", meta, "concurrency", "max", "duration")]
        if concurrency is not None:
            commands.append(("HSET", meta, "concurrency", concurrency))
        if rate is not None:
            commands.append(("HSET", meta, "max", rate[0], "duration", rate[1]))
        await self._redis.pipeline([("MULTI",), *commands, ("EXEC",)])

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    def _row(self, name: str, data: Any, options: Mapping[str, Any]) -> tuple[Arg, ...]:
        if not name:
            raise InvalidJob("a job needs a name")
        given = job_options.spelled(options)
        if "jobId" in given:
            submission.check_id(str(given["jobId"]))
        if self._schema is not None:
            check_schema(data, self._schema)
        return submission.full_row(name, to_json({} if data is None else data), given)

    async def _send(self, args: Sequence[Arg]) -> list[str]:
        request = secrets.token_hex(12)
        head = (request, self._options.max_depth, 0)
        scripts = Scripts(self._redis, self._options)
        replies = await resend(
            lambda: scripts.run("add", *head, *args),
            tries=_TRIES_MAX,
            patience_s=_PATIENCE_S,
            ends=ServerError,
        )
        return [_accepted(status.decode(), job_id.decode()) for status, job_id in replies]

    async def _add_flows(self, flows: Sequence[Flow], parent: dict[str, str] | None) -> list[str]:
        commands: list[tuple[Arg, ...]] = []
        # Level by level, as Node's flow producer adds them.
        level = [(flow, parent) for flow in flows]
        roots: list[str] = []
        while level:
            ids = [self._flow(flow, above, commands) for flow, above in level]
            roots = roots or ids
            level = [
                (child, {"id": job_id, "queue": self._queue_key(flow)})
                for (flow, _), job_id in zip(level, ids, strict=True)
                for child in flow.children
            ]
        script = SCRIPTS["add"]
        await self._redis.call("SCRIPT", "LOAD", script.source)
        replies = await self._redis.pipeline([("MULTI",), *commands, ("EXEC",)])
        answers = replies[-1] or ()
        for reply in (*replies, *answers):
            if isinstance(reply, ServerError):
                raise reply
        for ((status, job_id),) in answers:
            _accepted(status.decode(), job_id.decode())
        return roots

    def _flow(
        self, flow: Flow, parent: dict[str, str] | None, commands: list[tuple[Arg, ...]]
    ) -> str:
        given = job_options.spelled(flow.options)
        job_id = str(given.setdefault("jobId", new_job_id()))
        submission.check_id(job_id)
        if parent:
            given["parent"] = parent
        row = submission.full_row(
            flow.name,
            to_json({} if flow.data is None else flow.data),
            given,
            waits_children=bool(flow.children),
        )
        script = SCRIPTS["add"]
        prefix = f"{self._queue_key(flow)}:"
        commands.append(("EVALSHA", script.sha, script.keys, *keys(prefix), prefix, "", 0, 0, *row))
        return job_id

    def _queue_key(self, flow: Flow) -> str:
        return f"{self._options.prefix}:{flow.queue or self._options.queue}"


def open_producer(url: str, *, schema: Mapping[str, Any] | None = None) -> Producer:
    """A producer for the queue behind a URL; connects on first use."""
    options, store = parse_url(url).read(Options)
    return Producer(Redis(store, name="tenure"), options, schema=schema)


def open_events(url: str) -> QueueEvents:
    """The events of the queue behind a URL; connects on first use."""
    options, store = parse_url(url).read(Options)
    return QueueEvents(Redis(store, name="tenure"), options)


def _accepted(status: str, job_id: str) -> str:
    """BullMQ answers a duplicate with the job that is there, whatever it holds."""
    if status == "full":
        raise QueueFull("the queue is at its limit", contract=CONTRACT)
    if status == "orphan":
        raise Conflict(f"job {job_id}: the parent it names does not exist", contract=CONTRACT)
    return job_id
