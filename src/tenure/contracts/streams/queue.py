"""The `streams` contract on the seam: Redis Streams as the queue, one script for every step.

A job is a hash, and its events are a stream of their own. An entry of `jobs:stream` makes it
claimable; workers read that stream through the group `workers`. The pending entry is the lease, and
the hash holds the fence. The header of each script in `lua/` says what it does.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from math import ceil
from typing import Any, NamedTuple

import msgspec

from tenure.contracts.streams.options import CONTRACT, QUEUE, Options, keys
from tenure.contracts.streams.shards import ShardCheck
from tenure.core.encoding import short_hash
from tenure.core.errors import InvalidJob, LeaseLost, ServerError
from tenure.core.job import (
    NewJob,
    Submitted,
    check_job,
    check_trace,
    new_job_id,
    request_hash,
    scoped_key,
    submitted,
)
from tenure.core.lease import Lease, Report
from tenure.core.outcome import COMPLETED, Outcome, Verdict, verdict_of
from tenure.core.portable import check_job_options
from tenure.core.retry import RetryPolicy, delay_ms, exponential
from tenure.core.seam import Quarantined, QueueFeatures, Upkeep
from tenure.plans.flow import StoredFlows
from tenure.plans.schedule import StoredSchedules
from tenure.store.redis import Arg, Redis, ScriptFolder, is_wrong_type
from tenure.store.redis_queue import (
    BATCH_MAX,
    ClaimTracker,
    Quarantine,
    check_reports,
    error_code,
    extended,
    in_batches,
    lost,
    safe_worker_id,
    submit_valid,
)
from tenure.store.redis_records import RedisRecords

SCRIPTS = ScriptFolder("tenure.contracts.streams")
TERMINAL_EVENTS = frozenset({"done", "error", "canceled"})

_JOB_ID = re.compile(r"[A-Za-z0-9_.@-]{1,128}")
_TTL_DIGITS_MAX = 12
_PRELOADED = ("claim", "settle", "extend")
_CONSUMER_AGE_MS = 3_600_000
_NEVER_MS = 10**9


class _Empty(NamedTuple):
    """The last claim left nothing. `streams`: the keys to wait on, and the last id seen of each.

    At `due_s`, on the loop's clock, the next delayed job becomes due.
    """

    streams: tuple[Arg, ...]
    due_s: float

    def ms_until_due(self) -> int:
        return ceil((self.due_s - asyncio.get_running_loop().time()) * 1000)

    def blocking(self, wait_ms: int) -> tuple[Arg, ...]:
        return ("XREAD", "COUNT", 1, "BLOCK", wait_ms, "STREAMS", *self.streams)


class StreamsQueue:
    """A queue of the contract, for one event loop. `worker_id` names its consumer in the group."""

    def __init__(self, redis: Redis, options: Options, *, worker_id: str = "") -> None:
        self._redis = redis
        self._options = options
        self._keys = keys(options.namespace)
        self.worker_id = safe_worker_id(worker_id)
        self.slots = 0
        self._claims = ClaimTracker(secrets.token_hex(4))
        self._empty: _Empty | None = None
        self._last_wake = b"0-0"
        self._loaded = False
        self._check_shards = ShardCheck(redis, options)
        self._quarantine = Quarantine()
        self._backoff = exponential(options.retry_delay_ms, jitter="equal")
        records = RedisRecords(redis, f"{options.namespace}jobs:")
        self._schedules = StoredSchedules(records)
        self._flows = StoredFlows(records, self.submit)

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; a known id or idempotency key is answered with the job that has it."""
        if not self._check_shards.done:
            await self._check_shards()
        limits = (self._options.max_depth, self._options.idempotency_ttl_s)

        async def send(rows: Sequence[tuple[Arg, ...]]) -> list[Submitted]:
            args = (self._options.namespace, *limits, *chain.from_iterable(rows))
            replies = await self._redis.run(SCRIPTS["submit"], self._keys, args, replicated=True)
            return [_submitted(reply, self._options) for reply in replies]

        return await submit_valid(jobs, lambda job: _submit_args(job, self._options), send)

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; it blocks on the stream, so any program's XADD wakes it."""
        if limit < 1:
            return []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            if not await self._claims.take_turn(deadline):
                return []
            try:
                leases = await self._claim_once(limit, deadline)
            finally:
                self._claims.end_turn()
            if leases or loop.time() >= deadline:
                return leases

    @property
    def is_empty(self) -> bool:
        """Whether the last claim left nothing, so that `wait` knows what to wait for."""
        return self._empty is not None

    async def wait(self, wait_ms: int) -> None:
        """Return when the queue, if the last claim left it empty, may have jobs or time is up."""
        if self._empty is None:
            return
        wait_ms = min(wait_ms, self._empty.ms_until_due())
        if wait_ms > 0:
            try:
                await self._redis.block(*self._empty.blocking(wait_ms), wait_ms=wait_ms)
            except ServerError as error:
                if not is_wrong_type(error):  # else the next claim moves that key away
                    raise

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Reset the idle time of the pending entries; the script skips leases that are fresh."""

        async def send(batch: Sequence[Lease]) -> list[Lease | LeaseLost]:
            args = [arg for lease in batch for arg in (*_proof(lease), lease.task)]
            replies = await self._run("extend", self._options.lease_ms, *args)
            return [
                extended(lease, *rest) if status == b"ok" else lost(lease, *rest)
                for lease, (status, *rest) in zip(batch, replies, strict=True)
            ]

        return await in_batches(leases, send)

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Append events to the streams of running jobs."""
        check_reports(reports, TERMINAL_EVENTS, CONTRACT)

        async def send(batch: Sequence[Report]) -> list[LeaseLost | None]:
            args: list[Arg] = []
            for report in batch:
                args += (*_proof(report.lease), report.lease.task, report.type, report.step)
                args += (report.data, report.progress)
            replies = self._answers(await self._run("report", *args), len(batch))
            return [
                None if status == b"ok" else lost(report.lease, *rest)
                for report, (status, *rest) in zip(batch, replies, strict=True)
            ]

        return await in_batches(reports, send)

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: hash, terminal event and acknowledgement in one step each."""

        async def send(batch: Sequence[Outcome]) -> list[Verdict]:
            reply = await self._run("settle", *settle_rows(batch, self._backoff))
            for outcome in batch:
                self._claims.release(outcome.lease.handle)
            if reply == len(batch):  # the short reply: every job was completed
                return [COMPLETED] * len(batch)
            verdicts = zip(batch, self._answers(reply, len(batch)), strict=True)
            return [_verdict(outcome.lease, each) for outcome, each in verdicts]

        return await in_batches(outcomes, send)

    async def upkeep(self) -> Upkeep:
        """Promote due jobs, take back expired leases, trim; safe to call from every worker."""
        options = self._options
        *counts, quarantined = await self._run(
            "upkeep",
            options.lease_ms,
            options.lost_max,
            options.journal_bytes,
            round(options.journal_days * 86_400_000),
            _CONSUMER_AGE_MS,
            self.worker_id,
            self.slots,
            round(max(options.journal_days, options.unread_days) * 86_400_000),
            options.foreign_lease_ms,
        )
        self._add_quarantined(quarantined)
        return Upkeep(*counts)

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam."""
        return QueueFeatures(
            claim_max=BATCH_MAX,
            take_quarantined=self.take_quarantined,
            contract=CONTRACT,
            schedules=self._schedules,
            flows=self._flows,
        )

    def take_quarantined(self) -> list[Quarantined]:
        """Records quarantined since the last call."""
        return self._quarantine.take()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _run(self, name: str, *args: Arg) -> Any:
        return await self._redis.run(SCRIPTS[name], self._keys, (self._options.namespace, *args))

    async def _claim_once(self, limit: int, deadline: float) -> list[Lease]:
        """Run the claim script: at once or, if the queue was empty, when something is added."""
        if not self._loaded:  # so that the first settle and extend need no second round trip
            await self._check_shards()
            await self._redis.load(SCRIPTS[name] for name in _PRELOADED)
            self._loaded = True
        recover, held = self._claims.begin()
        args: tuple[Arg, ...] = (
            self._options.namespace,
            self.worker_id,
            min(limit, BATCH_MAX),
            self._options.lease_ms,
            self._options.lost_max,
            recover,
            self._options.foreign_lease_ms,
            self._claims.instance,
            self._claims.number,
            *held,
        )
        empty, self._empty = self._empty, None
        left_ms = int((deadline - asyncio.get_running_loop().time()) * 1000)
        wait_ms = 0 if empty is None else min(left_ms, empty.ms_until_due())
        if empty is None or wait_ms < 1:
            reply = await self._redis.run(SCRIPTS["claim"], self._keys, args)
        else:
            reply = await self._block_then_claim(empty, wait_ms, args)
            if reply is None:
                return []
        state, now, last, woken, due, groups, quarantined = reply
        leases = self._leases(groups, now)
        self._claims.answered([lease.handle for lease in leases])
        self._add_quarantined(quarantined)
        self._last_wake = woken or self._last_wake
        if last:
            due_ms = int(due) - now if due != b"0" else _NEVER_MS
            self._empty = self._empty_queue(state, last, due_ms)
        return leases

    async def _block_then_claim(self, empty: _Empty, wait_ms: int, args: Sequence[Arg]) -> Any:
        """Claim when the stream gets an entry, a script wakes us, or the time is up.

        None if a key to block on holds another type. The script, which ran all the same, has moved
        that key away. The next claim finds the leases that this one took.
        """
        self._claims.blocks = True
        try:
            return await self._redis.block_then_run(
                empty.blocking(wait_ms), SCRIPTS["claim"], self._keys, args, wait_ms=wait_ms
            )
        except ServerError as error:
            if not is_wrong_type(error):
                raise
            return None
        finally:
            self._claims.blocks = False

    def _empty_queue(self, state: bytes, last: bytes, due_ms: int) -> _Empty:
        stream, wake = self._keys[0], self._keys[3]
        due_s = asyncio.get_running_loop().time() + due_ms / 1000
        if state == b"paused":  # new and due jobs are not handed out, so only `wake` matters
            return _Empty((wake, self._last_wake), due_s + _NEVER_MS)
        return _Empty((stream, wake, last, self._last_wake), due_s)

    def _add_quarantined(self, pairs: list[bytes]) -> None:
        for job_id, reason in zip(pairs[::2], pairs[1::2], strict=True):
            self._quarantine.add(job_id, reason)

    def _answers(self, replies: list[Any], count: int) -> list[Any]:
        """The answers to `count` items; a further element lists records that were quarantined."""
        if len(replies) > count:
            self._add_quarantined(replies.pop())
        return replies

    def _leases(self, groups: list[Any], now: int) -> list[Lease]:
        lease_ms, default_ttl_s = self._options.lease_ms, b"%d" % self._options.ttl_s
        leases = []
        for task, fields, ttl_s, rows in groups:
            group = _LeaseGroup.parse(task, fields, ttl_s, now)
            ttl_ms = 0 if ttl_s == default_ttl_s else _own_ttl_ms(ttl_s)
            values = iter(rows)
            for job_id, payload, entry in zip(values, values, values, strict=True):
                handle, _, rest = entry.decode().partition(" ")
                created_ms, trace = rest.split() if rest else (handle.partition("-")[0], "-")
                leases.append(
                    Lease(
                        job_id=job_id.decode(errors="replace"),
                        queue=QUEUE,
                        task=group.task_name,
                        payload=payload,
                        attempt=group.attempt,
                        max_attempts=group.max_attempts,
                        fence=group.fence,
                        token=group.token,
                        lease_until_ms=now + lease_ms,
                        lease_ms=lease_ms,
                        created_ms=min(now, int(created_ms)),
                        handle=handle,
                        trace="" if trace == "-" else trace,
                        ttl_ms=ttl_ms,
                        extra=group,
                    )
                )
        return leases


def _own_ttl_ms(ttl_s: bytes) -> int:
    """A time to live as stored by any gateway; 0 if it cannot be read."""
    return int(ttl_s) * 1000 if ttl_s.isdigit() and len(ttl_s) <= _TTL_DIGITS_MAX else 0


class _LeaseGroup(NamedTuple):
    """What leases of one claim have in common, parsed once; settle sends it once per batch.

    `fields` is the hash field `lease` as the claim wrote it (see `lua/include/job.lua`). If it is
    unchanged when the job is settled, no other program has changed the job.
    """

    fields: bytes
    task: bytes
    ttl_s: bytes
    claimed_ms: int
    task_name: str
    fence: int
    token: str
    attempt: int
    max_attempts: int

    @classmethod
    def parse(cls, task: bytes, fields: bytes, ttl_s: bytes, now: int) -> _LeaseGroup:
        fence, _, attempt, max_attempts, _, _, token = fields.decode().split()
        name = task.decode(errors="replace")  # other gateways may store any bytes
        return cls(
            fields, task, ttl_s, now, name, int(fence), token, int(attempt), int(max_attempts)
        )


def settle_rows(outcomes: Iterable[Outcome], backoff: RetryPolicy) -> list[Arg]:
    """The arguments of the settle script: completions in groups, other outcomes one by one.

    What consecutive completions have in common, which often includes the result, is sent once.
    """
    rows: list[Arg] = []
    last: _LeaseGroup | None = None
    for (group, result), run in groupby(outcomes, _in_common):
        if group is None:
            for outcome in run:
                rows += _in_full(outcome, backoff)
            continue
        if group is not last:
            last = group
            rows += ("like", group.fields, group.task, group.ttl_s, group.claimed_ms)
        jobs = [arg for each in run for arg in (each.lease.job_id, each.lease.handle)]
        rows += ("done", result, short_hash(result), len(jobs) // 2, *jobs)
    return rows


def _in_common(outcome: Outcome) -> tuple[_LeaseGroup | None, bytes]:
    """What a completion may share with the one before it; no group if it must be sent in full."""
    lease, group = outcome.lease, outcome.lease.extra
    if (
        outcome.kind != "complete"
        or not isinstance(group, _LeaseGroup)
        or (group.fence, group.token) != (lease.fence, lease.token)  # the script refuses it
    ):
        return None, b""
    return group, outcome.result


def _in_full(outcome: Outcome, backoff: RetryPolicy) -> tuple[Arg, ...]:
    lease, kind, wait_ms = outcome.lease, outcome.kind, outcome.delay_ms
    failure = outcome.failure
    body, result_h = outcome.result, ""
    if kind == "fail":  # the script decides by the job's attempts; the delay is our default
        wait_ms = delay_ms(backoff, lease.attempt, secrets.randbelow(1000) / 1000)
    if kind == "complete":
        wait_ms, result_h = 0, short_hash(body)
    else:
        body = msgspec.json.encode(failure) if failure else b""
    end = ("end", *_proof(lease), kind, lease.task)
    return (*end, body, result_h, error_code(failure), wait_ms)


def _proof(lease: Lease) -> tuple[Arg, ...]:
    return (lease.job_id, lease.handle, lease.fence, lease.token)


def _verdict(lease: Lease, reply: Any) -> Verdict:
    if reply == b"complete":
        return COMPLETED
    kind, detail = reply
    return lost(lease, detail) if kind == b"lost" else verdict_of(kind.decode(), detail)


def _submit_args(job: NewJob, options: Options) -> tuple[Arg, ...]:
    """The arguments of one job, in the order of submit-9.lua; raises `InvalidJob`."""
    check_new(job)
    payload_h = short_hash(job.payload)
    return (
        job.job_id or new_job_id(),
        job.task,
        job.payload,
        ttl_s_of(job, options),
        job.max_attempts or 0,
        scoped_key(job.requester, job.idempotency_key) if job.idempotency_key else "",
        request_hash(job.task, payload_h, job.requester, job.ttl_ms, job.max_attempts),
        job.requester,
        job.delay_ms,
        job.trace or "-",
        payload_h,
    )


def ttl_s_of(job: NewJob, options: Options) -> int:
    """How long a job is kept, in seconds."""
    return max(1, -(-job.ttl_ms // 1000)) if job.ttl_ms else options.ttl_s


def check_new(job: NewJob) -> None:
    """Raise `InvalidJob` for a job that this contract cannot store."""
    if job.job_id and not _JOB_ID.fullmatch(job.job_id):
        raise InvalidJob(f"job id {job.job_id[:140]!r}: 1 to 128 of letters, digits and _ . @ -")
    check_job(job)
    check_trace(job.trace)
    if job.ttl_ms is not None and job.ttl_ms < 1:
        raise InvalidJob(f"ttl_ms is at least 1, not {job.ttl_ms}")
    check_job_options(CONTRACT, job)
    if job.options:
        names = ", ".join(sorted(job.options))
        raise InvalidJob(f"this contract has no job options; these were given: {names}")


def _submitted(reply: list[Any], options: Options) -> Submitted:
    """One answer of the script: status, id and, for a job it created, the time."""
    status, job_id, *created_ms = reply
    return submitted(status.decode(), job_id.decode(), *created_ms, depth_max=options.max_depth)
