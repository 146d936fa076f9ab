"""The `streams` contract on the seam: Redis Streams as the queue, one script for every step.

A job is a hash, its news a stream of its own, and its turn an entry of `jobs:stream`, which workers
read through the group `workers`. The pending entry is the lease; the hash holds the fence. What
each script does and which clauses it serves is said at the head of every file in `lua/`.
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
from tenure.core.errors import InvalidJob, LeaseLost, ServerError
from tenure.core.job import (
    NewJob,
    Submitted,
    check_job,
    check_trace,
    new_job_id,
    request_hash,
    scoped_key,
    short_hash,
    submitted,
)
from tenure.core.lease import Lease, Report
from tenure.core.outcome import COMPLETED, Outcome, Verdict
from tenure.core.portable import check_job_options
from tenure.core.retry import RetryPolicy, delay_ms, exponential
from tenure.core.seam import Quarantined, Upkeep
from tenure.store.redis import Arg, Redis
from tenure.store.redis_connection import is_wrong_type
from tenure.store.redis_queue import (
    BATCH_MAX,
    Quarantine,
    check_reports,
    error_code,
    extended,
    in_batches,
    lost,
    safe_worker_id,
    submit_valid,
    verdict_of,
)
from tenure.store.scripts import ScriptFolder

SCRIPTS = ScriptFolder("tenure.contracts.streams")
TERMINAL_EVENTS = frozenset({"done", "error", "canceled"})

_JOB_ID = re.compile(r"[A-Za-z0-9_.@-]{1,128}")
_NEEDED_BY_HOLDERS = ("claim", "settle", "extend")
_HELD_MAX = 100_000
_CONSUMER_AGE_MS = 3_600_000
_NEVER_MS = 10**9


class _Drained(NamedTuple):
    """Nothing was left to claim. `streams`: keys and positions behind which more would show."""

    streams: tuple[Arg, ...]
    due_s: float

    def quiet_ms(self) -> int:
        """How long nothing will become claimable by itself, rounded up."""
        return ceil((self.due_s - asyncio.get_running_loop().time()) * 1000)


class StreamsQueue:
    """A queue of the contract, for one event loop. `worker_id` is the consumer it claims as."""

    claim_max = BATCH_MAX

    def __init__(self, redis: Redis, options: Options, *, worker_id: str = "") -> None:
        self._redis = redis
        self._options = options
        self._keys = keys(options.namespace)
        self.worker_id = safe_worker_id(worker_id)
        self.slots = 0
        self._held: dict[str, None] = {}
        # One claim at a time: a second one could not tell what the first is about to hold.
        self._claiming: asyncio.Future[None] | None = None
        self._listening = False
        self._drained: _Drained | None = None
        self._woken = b"0-0"
        self._answer_lost = False
        self._instance = secrets.token_hex(4)
        self._claims = 0
        self._loaded = False
        self._quarantine = Quarantine()
        self._backoff = exponential(options.retry_delay_ms, jitter="equal")

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job it stands for."""
        limits = (self._options.max_depth, self._options.idempotency_ttl_s)

        async def send(rows: Sequence[tuple[Arg, ...]]) -> list[Submitted]:
            replies = await self._run("submit", *limits, *chain.from_iterable(rows))
            return [_submitted(reply, self._options) for reply in replies]

        return await submit_valid(jobs, lambda job: _submit_args(job, self._options), send)

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; waits on the stream itself: foreign producers wake it too."""
        if limit < 1:
            return []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            left_ms = max(0, int((deadline - loop.time()) * 1000))
            if self._claiming is not None:
                if not await self._their_turn(self._claiming, left_ms):
                    return []
                continue
            self._claiming = loop.create_future()
            try:
                leases = await self._claim_once(limit, left_ms)
            finally:
                self._claiming.set_result(None)
                self._claiming = None
            if leases or loop.time() >= deadline:
                return leases

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Make the pending entries young again; asks for little when most of the lease is left."""

        async def send(batch: Sequence[Lease]) -> list[Lease | LeaseLost]:
            args = [arg for lease in batch for arg in (*_proof(lease), lease.task)]
            replies = await self._run("extend", self._options.lease_ms, *args)
            return [
                extended(lease, *rest) if word == b"ok" else lost(lease, *rest)
                for lease, (word, *rest) in zip(batch, replies, strict=True)
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
                None if word == b"ok" else lost(report.lease, *rest)
                for report, (word, *rest) in zip(batch, replies, strict=True)
            ]

        return await in_batches(reports, send)

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: hash, terminal event and acknowledgement in one step each."""

        async def send(batch: Sequence[Outcome]) -> list[Verdict]:
            reply = await self._run("settle", *settle_rows(batch, self._backoff))
            for outcome in batch:
                self._held.pop(outcome.lease.handle, None)
            if reply == len(batch):  # all were plainly completed
                return [COMPLETED] * len(batch)
            verdicts = zip(batch, self._answers(reply, len(batch)), strict=True)
            return [_verdict(outcome.lease, each) for outcome, each in verdicts]

        return await in_batches(outcomes, send)

    async def upkeep(self) -> Upkeep:
        """Promote, take back, trim; every worker may do it as often as it likes."""
        options = self._options
        *counts, aside = await self._run(
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
        self._set_aside(aside)
        return Upkeep(*counts)

    def take_quarantined(self) -> list[Quarantined]:
        """What was set aside since the last call."""
        return self._quarantine.take()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _run(self, name: str, *args: Arg) -> Any:
        return await self._redis.run(SCRIPTS[name], self._keys, (self._options.namespace, *args))

    async def _their_turn(self, claiming: asyncio.Future[None], left_ms: int) -> bool:
        """Wait for another claim of this instance; False when our time is over before it is.

        Only a claim that listens takes long, and while it hears nothing there is nothing to take.
        """
        timeout_s = left_ms / 1000 if self._listening else None
        done, _ = await asyncio.wait([claiming], timeout=timeout_s)
        return bool(done)

    async def _claim_once(self, limit: int, left_ms: int) -> list[Lease]:
        """One call of the script: at once or, if nothing was left, when something comes."""
        if not self._loaded:  # the first outcomes and extensions shall not wait for their scripts
            await self._redis.load(SCRIPTS[name] for name in _NEEDED_BY_HOLDERS)
            self._loaded = True
        recover = self._answer_lost
        self._claims += 1
        args = (
            self._options.namespace,
            self.worker_id,
            min(limit, BATCH_MAX),
            self._options.lease_ms,
            self._options.lost_max,
            1 if recover else 0,
            self._options.foreign_lease_ms,
            self._instance,
            self._claims,
            *(self._held if recover else ()),
        )
        # Set before asking: whatever ends this call early, the next one looks for what it took.
        self._answer_lost = True
        drained, self._drained = self._drained, None
        listen_ms = 0 if drained is None else min(left_ms, drained.quiet_ms())
        if drained is None or listen_ms < 1:
            reply = await self._redis.run(SCRIPTS["claim"], self._keys, args)
        else:
            reply = await self._listen(drained, listen_ms, args)
            if reply is None:
                return []
        self._answer_lost = False
        state, now, last, woken, due, groups, aside = reply
        self._set_aside(aside)
        self._woken = woken or self._woken
        if last:
            quiet_ms = int(due) - now if due != b"0" else _NEVER_MS
            self._drained = self._nothing_left(state, last, quiet_ms)
        return self._leases(groups, now)

    async def _listen(self, drained: _Drained, wait_ms: int, args: Sequence[Arg]) -> Any:
        """Claim when something is added to the stream, a script wakes us, or the time is up.

        None when a key to listen on holds another type. The script has moved it away; what it took
        besides is found by the next claim.
        """
        blocking = ("XREAD", "COUNT", 1, "BLOCK", wait_ms, "STREAMS", *drained.streams)
        self._listening = True
        try:
            return await self._redis.block_then_run(
                blocking, SCRIPTS["claim"], self._keys, args, wait_ms=wait_ms
            )
        except ServerError as error:
            if not is_wrong_type(error):
                raise
            return None
        finally:
            self._listening = False

    def _nothing_left(self, state: bytes, last: bytes, quiet_ms: int) -> _Drained:
        stream, wake = self._keys[0], self._keys[3]
        due_s = asyncio.get_running_loop().time() + quiet_ms / 1000
        if state == b"paused":  # nothing is handed out, whatever is added or due
            return _Drained((wake, self._woken), due_s + _NEVER_MS)
        return _Drained((stream, wake, last, self._woken), due_s)

    def _set_aside(self, pairs: list[bytes]) -> None:
        for job_id, reason in zip(pairs[::2], pairs[1::2], strict=True):
            self._quarantine.add(job_id, reason)

    def _answers(self, replies: list[Any], count: int) -> list[Any]:
        """The answers to `count` items; the records set aside meanwhile come behind them."""
        if len(replies) > count:
            self._set_aside(replies.pop())
        return replies

    def _leases(self, groups: list[Any], now: int) -> list[Lease]:
        held, lease_ms = self._held, self._options.lease_ms
        leases = []
        for task, words, ttl_s, rows in groups:
            group = _LeaseGroup.parse(task, words, ttl_s, now)
            parts = iter(rows)
            for job_id, payload, entry in zip(parts, parts, parts, strict=True):
                handle, created_ms, trace = entry.decode().split()
                held[handle] = None
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
                        extra=group,
                    )
                )
        while len(held) > _HELD_MAX:  # only leases that were lost unsettled stay here
            del held[next(iter(held))]
        return leases


class _LeaseGroup(NamedTuple):
    """What leases of one claim have in common, parsed once; settle sends it once a batch.

    `words` is the hash field `lease` as the claim wrote it (see `lua/include/job.lua`). If it is
    unchanged when the job is settled, no other program has touched the job.
    """

    words: bytes
    task: bytes
    ttl_s: bytes
    claimed_ms: int
    task_name: str
    fence: int
    token: str
    attempt: int
    max_attempts: int

    @classmethod
    def parse(cls, task: bytes, words: bytes, ttl_s: bytes, now: int) -> _LeaseGroup:
        fence, _, attempt, max_attempts, _, _, token = words.decode().split()
        name = task.decode(errors="replace")  # a foreign gateway's may be anything
        return cls(
            words, task, ttl_s, now, name, int(fence), token, int(attempt), int(max_attempts)
        )


def settle_rows(outcomes: Iterable[Outcome], backoff: RetryPolicy) -> list[Arg]:
    """The rows of the settle script: plain completions in few parts, all others in full.

    What consecutive completions have in common, mostly also the result, is sent once.
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
            rows += ("like", group.words, group.task, group.ttl_s, group.claimed_ms)
        jobs = [part for each in run for part in (each.lease.job_id, each.lease.handle)]
        rows += ("done", result, short_hash(result), len(jobs) // 2, *jobs)
    return rows


def _in_common(outcome: Outcome) -> tuple[_LeaseGroup | None, bytes]:
    """What a completion may share with the one before it; no group for what is sent in full."""
    lease, group = outcome.lease, outcome.lease.extra
    if (
        outcome.kind != "complete"
        or not isinstance(group, _LeaseGroup)
        or (group.fence, group.token) != (lease.fence, lease.token)  # let the script refuse it
    ):
        return None, b""
    return group, outcome.result


def _in_full(outcome: Outcome, backoff: RetryPolicy) -> tuple[Arg, ...]:
    lease, kind, wait_ms = outcome.lease, outcome.kind, outcome.delay_ms
    failure = outcome.failure
    body, result_h = outcome.result, ""
    if kind == "fail":  # the job's own attempts decide; the delay is the contract's default
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
    return lost(lease, detail) if kind == b"lost" else verdict_of(kind, detail)


def _submit_args(job: NewJob, options: Options) -> tuple[Arg, ...]:
    """The arguments of one job, in the order of submit-9.lua; raises `InvalidJob`."""
    _check(job)
    payload_h = short_hash(job.payload)
    return (
        job.job_id or new_job_id(),
        job.task,
        job.payload,
        max(1, -(-job.ttl_ms // 1000)) if job.ttl_ms else options.ttl_s,
        job.max_attempts or 0,
        scoped_key(job.requester, job.idempotency_key) if job.idempotency_key else "",
        request_hash(job.task, payload_h, job.requester, job.ttl_ms, job.max_attempts),
        job.requester,
        job.delay_ms,
        job.trace or "-",
        payload_h,
    )


def _check(job: NewJob) -> None:
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
    """The seam's answer for the script's: status, id and, for a job just created, its time."""
    status, job_id, *created_ms = reply
    return submitted(status.decode(), job_id.decode(), *created_ms, depth_max=options.max_depth)
