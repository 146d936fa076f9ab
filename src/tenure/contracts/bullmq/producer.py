"""The producer, as BullMQ users know it: add, add_bulk, flows, schedulers, rate limit.

    producer = open_producer("bullmq+redis://localhost:6379/0?queue=mail")
    job_id = await producer.add("welcome", {"to": "ada"}, attempts=3, backoff=1000)

Options have BullMQ's names, or the same in snake_case. An add whose reply is lost is sent again
under the same request id, so that the job is stored once.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tenure.contracts.bullmq.options import (
    CONTRACT,
    PARENT_OPTIONS,
    PRIORITY_MAX,
    SHORT,
    URL_EXAMPLE,
    Options,
    keys,
    long_names,
    pack_options,
)
from tenure.contracts.bullmq.records import QueueEvents
from tenure.contracts.bullmq.schedulers import Scheduler
from tenure.contracts.bullmq.schema import check as check_schema
from tenure.contracts.bullmq.scripts import SCRIPTS, Scripts
from tenure.core.encoding import short_hash, to_json
from tenure.core.errors import Conflict, InvalidJob, QueueFull, ServerError
from tenure.core.job import (
    NewJob,
    Submitted,
    check_job,
    new_job_id,
    request_hash,
    scoped_key,
    submitted,
)
from tenure.core.portable import check_job_options
from tenure.core.registry import parse_url
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import in_batches, open_redis
from tenure.store.resend import resend

_EXACT_MAX = 2**53
_TRIES_MAX = 5
_PATIENCE_S = 10.0
_FOREVER = 9_007_199_254_740_991
_DEDUP_MODES = (("e", "extend"), ("r", "replace"), ("k", "keepLastIfActive"), ("s", "reschedule"))


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """A job and the children it waits for; each may be in another queue of the same server."""

    name: str
    data: Any = None
    queue: str = ""
    options: Mapping[str, Any] = {}
    children: Sequence[Flow] = ()


class Producer:
    """Adds jobs to one queue, for one event loop. `schema` checks payloads before they are sent."""

    def __init__(
        self, redis: Redis, options: Options, *, schema: Mapping[str, Any] | None = None
    ) -> None:
        self._redis = redis
        self._options = options
        self._schema = schema
        self._scripts = Scripts(redis, options)
        self._scheduler = Scheduler(redis, self._scripts)

    async def add(self, name: str, data: Any = None, **options: Any) -> str:
        """Store one job; returns its id, or the id of the job that it duplicates."""
        (job_id,) = await self.add_bulk([(name, data, options)])
        return job_id

    async def add_bulk(self, jobs: Iterable[tuple[str, Any, Mapping[str, Any]]]) -> list[str]:
        """Store many jobs; each batch of five hundred is stored whole or not at all."""
        rows = [self._row(name, data, options) for name, data, options in jobs]
        return await in_batches(rows, self._send)

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
        """Make a job every `every` ms or by a cron `pattern`; returns the id of the next one.

        Further options: tz, limit, offset, startDate, endDate.
        """
        given = long_names(options or {})
        packed = {SHORT.get(key, key): value for key, value in given.items()}
        return await self._scheduler.upsert(
            scheduler_id,
            {"every": every, "pattern": pattern, **repeat},
            name=name or scheduler_id,
            data=to_json(data) if data is not None else b"",
            opts=to_json(packed),
        )

    async def remove_scheduler(self, scheduler_id: str) -> bool:
        """Remove a scheduler; False if there is none."""
        return await self._scheduler.remove(scheduler_id)

    async def rate_limit(self, for_ms: int) -> None:
        """Start no job of a rate limited queue for so long.

        A handler that another service asked to slow down calls this and raises `Snooze(0)`.
        """
        await self._redis.call("SET", self._scripts.keys.limiter, _FOREVER, "PX", for_ms)

    async def limit(
        self, *, concurrency: int | None = None, rate: tuple[int, int] | None = None
    ) -> None:
        """Limit all workers of the queue together; None removes a limit. `rate`: (jobs, ms)."""
        meta = self._scripts.keys.meta
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
        given = long_names(options)
        if "jobId" in given:
            _check_id(str(given["jobId"]))
        if self._schema is not None:
            check_schema(data, self._schema)
        return _full_args(name, to_json({} if data is None else data), given)

    async def _send(self, rows: Sequence[tuple[Arg, ...]]) -> list[str]:
        head = (secrets.token_hex(12), self._options.max_depth, 0)
        replies = await resend(
            lambda: self._scripts.run_rows("add", head, rows, replicated=True),
            tries=_TRIES_MAX,
            patience_s=_PATIENCE_S,
            final_errors=ServerError,
        )
        return [_accepted(*reply) for reply in replies]

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
        load = ("SCRIPT", "LOAD", SCRIPTS["add"].source)
        whole = [load, ("MULTI",), *commands, ("EXEC",)]
        replies = await self._redis.pipeline(whole, replicated=True)
        answers = replies[-1] or ()
        for reply in (*replies, *answers):
            if isinstance(reply, ServerError):
                raise reply
        for (reply,) in answers:
            _accepted(*reply)
        return roots

    def _flow(
        self, flow: Flow, parent: dict[str, str] | None, commands: list[tuple[Arg, ...]]
    ) -> str:
        given = long_names(flow.options)
        job_id = str(given.setdefault("jobId", new_job_id()))
        _check_id(job_id)
        if parent:
            given["parent"] = parent
        row = _full_args(
            flow.name,
            to_json({} if flow.data is None else flow.data),
            given,
            waits_children=bool(flow.children),
        )
        script = SCRIPTS["add"]
        prefix = f"{self._queue_key(flow)}:"
        declared = self._redis.declared_keys(keys(prefix))
        head = ("EVALSHA", script.sha, len(declared), *declared)
        commands.append((*head, prefix, "", 0, 0, *row))
        return job_id

    def _queue_key(self, flow: Flow) -> str:
        return f"{self._options.prefix}:{flow.queue or self._options.queue}"


def open_producer(url: str, *, schema: Mapping[str, Any] | None = None) -> Producer:
    """A producer for the queue behind a URL; connects on first use."""
    return Producer(*open_redis(parse_url(url), Options, URL_EXAMPLE), schema=schema)


def open_events(url: str) -> QueueEvents:
    """The events of the queue behind a URL; connects on first use."""
    return QueueEvents(*open_redis(parse_url(url), Options, URL_EXAMPLE))


def _accepted(status: bytes, job_id: bytes) -> str:
    """The id of the job; for a duplicate, as in BullMQ, the id of the job that is there."""
    if status == b"full":
        raise QueueFull("the queue is at its limit", contract=CONTRACT)
    if status == b"orphan":
        raise Conflict(
            f"job {job_id.decode()}: the parent it names does not exist", contract=CONTRACT
        )
    return job_id.decode()


def submit_args(job: NewJob) -> tuple[Arg, ...]:
    """The arguments of one job, in the order of add-16.lua; raises `InvalidJob`."""
    _check_job(job)
    payload_h = short_hash(job.payload)
    key = scoped_key(job.requester, job.idempotency_key) if job.idempotency_key else ""
    request_h = request_hash(job.task, payload_h, job.requester, job.max_attempts) if key else ""
    attempts = job.max_attempts or 0
    if job.options or job.trace:
        given = _merged_options(job, attempts)
        return _full_args(
            job.task, job.payload, given, key=key, request_h=request_h, payload_h=payload_h
        )
    packed = _plain_options(attempts, job.delay_ms, job.priority)
    return (
        job.job_id, job.task, job.payload, packed, "", job.delay_ms, job.priority, attempts,
        payload_h, key, request_h, "",
    )  # fmt: skip


@functools.lru_cache(maxsize=1_000)
def _plain_options(attempts: int, delay_ms: int, priority: int) -> bytes:
    """The JSON of `opts` for most jobs."""
    given = {"attempts": attempts, "delay": delay_ms, "priority": priority}
    return pack_options({k: v for k, v in given.items() if v or k == "attempts"})


def _merged_options(job: NewJob, attempts: int) -> dict[str, Any]:
    """The job's own BullMQ options, with those that the seam has fields for."""
    given = long_names(job.options)
    if attempts:
        given["attempts"] = attempts
    if job.priority:
        given["priority"] = job.priority
    if job.delay_ms:
        given["delay"] = job.delay_ms
    if job.trace and not {"telemetryMetadata", "tm", "omitContext", "omc"} & given.keys():
        carrier = msgspec.json.encode({"traceparent": job.trace}).decode()
        given["telemetryMetadata"] = carrier
    job_id = str(given.get("jobId") or job.job_id)
    if job_id:
        given["jobId"] = job_id
        _check_id(job_id)
    return given


def _full_args(
    name: str,
    data: bytes,
    given: Mapping[str, Any],
    *,
    key: str = "",
    request_h: str = "",
    payload_h: str = "",
    waits_children: bool = False,
) -> tuple[Arg, ...]:
    """The arguments of a job with any options, under their long names."""
    _check_options(given)
    size_limit = given.get("sizeLimit")
    if size_limit is not None and not _is_number(size_limit):
        raise InvalidJob(f"sizeLimit {size_limit!r}: a number of bytes")
    if size_limit and len(data) > size_limit:
        raise InvalidJob(f"The size of job {name} exceeds the limit {size_limit} bytes")
    extra = _parent(given) | _dedup(given)
    if given.get("lifo") is True:
        extra["lifo"] = True
    if waits_children:
        extra["waits_children"] = True
    return (
        str(given.get("jobId") or ""),
        name,
        data,
        pack_options(given),
        given.get("timestamp") or "",
        int(given.get("delay") or 0),
        int(given.get("priority") or 0),
        int(given.get("attempts") or 0),
        payload_h or short_hash(data),
        key,
        request_h,
        msgspec.json.encode(extra) if extra else "",
    )


def submit_answer(reply: Sequence[bytes], options: Options) -> Submitted:
    """The script's reply for one job, as the seam has it."""
    status, job_id = reply
    if status == b"orphan":
        return Submitted("", "invalid", "the parent it names does not exist")
    outcome = "replayed" if status == b"deduplicated" else status.decode()
    return submitted(outcome, job_id.decode(), depth_max=options.max_depth)


def _check_id(job_id: str) -> None:
    """Refuse ids that BullMQ's clients refuse or misread."""
    if job_id.isdecimal():
        raise InvalidJob(f"job id {job_id!r}: an id of one's own is not a whole number in BullMQ")
    if ":" in job_id and len(job_id.split(":")) != 3:
        raise InvalidJob(f"job id {job_id!r}: an id of one's own has no colon in BullMQ")


def _check_options(given: Mapping[str, Any]) -> None:
    """Refuse option values that no BullMQ client would accept."""
    priority = given.get("priority") or 0
    if not isinstance(priority, int) or not 0 <= priority <= PRIORITY_MAX:
        raise InvalidJob(f"priority {priority!r}: a whole number from 0 to {PRIORITY_MAX}")
    delay = given.get("delay") or 0
    if not _is_number(delay) or not 0 <= delay < _EXACT_MAX:
        raise InvalidJob(f"delay {delay!r}: milliseconds, not negative")
    attempts = given.get("attempts") or 0
    if not _is_number(attempts) or not abs(attempts) < _EXACT_MAX:
        raise InvalidJob(f"attempts {attempts!r}: a whole number")
    stamp = given.get("timestamp") or 0
    if not _is_number(stamp) or not 0 <= stamp < _EXACT_MAX:
        raise InvalidJob(f"timestamp {stamp!r}: milliseconds since 1970")
    dedup = given.get("deduplication")
    ttl = dedup.get("ttl") if isinstance(dedup, Mapping) else None
    if ttl is not None and not (_is_number(ttl) and 0 <= ttl < _EXACT_MAX):
        raise InvalidJob(f"deduplication ttl {ttl!r}: milliseconds, not negative")
    if dedup is not None and not _dedup(given):
        raise InvalidJob("deduplication needs an id, as in {'id': 'order-17', 'ttl': 5000}")
    exclusive = [n for n in (*PARENT_OPTIONS, *PARENT_OPTIONS.values()) if given.get(n)]
    if len(exclusive) > 1:
        together = ", ".join(exclusive)
        raise InvalidJob(f"The following options cannot be used together: {together}")
    jitter = given["backoff"].get("jitter") if isinstance(given.get("backoff"), Mapping) else None
    if jitter is not None and not (_is_number(jitter) and 0 <= jitter <= 1):
        raise InvalidJob(f"backoff jitter {jitter!r}: a number from 0 to 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_job(job: NewJob) -> None:
    check_job(job)
    check_job_options(CONTRACT, job)
    if not 0 <= job.priority <= PRIORITY_MAX:
        raise InvalidJob(f"priority {job.priority}: 0 to {PRIORITY_MAX}, 0 comes first")
    if job.job_id:
        _check_id(job.job_id)


def _parent(given: Mapping[str, Any]) -> dict[str, Any]:
    parent = given.get("parent")
    if not parent:
        return {}
    stored: dict[str, Any] = {"id": parent["id"], "queueKey": parent["queue"]}
    for long, short in PARENT_OPTIONS.items():
        if given.get(long) or given.get(short):
            stored[short] = True
    return {
        "parent_key": f"{parent['queue']}:{parent['id']}",
        "parent": msgspec.json.encode(stored).decode(),
    }


def _dedup(given: Mapping[str, Any]) -> dict[str, Any]:
    dedup = given.get("deduplication") or given.get("de")
    if not isinstance(dedup, Mapping) or not dedup.get("id"):
        return {}
    mode = "".join(letter for letter, option in _DEDUP_MODES if dedup.get(option))
    ttl = int(dedup.get("ttl") or 0)
    return {"deid": str(dedup["id"]), "dedup_ttl": ttl, "dedup_mode": mode}
