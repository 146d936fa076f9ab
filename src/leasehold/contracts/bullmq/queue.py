"""The `bullmq` contract on the seam: the data real BullMQ keeps in Redis, by scripts of our own.

A job is a hash, its turn an id in `wait`, `prioritized` or `delayed`, its lease the key
`<id>:lock`. Node workers and producers may share the queue at any time: everything they read is
written as they write it. What they do not know (the journal, one field of the job) stands beside
it. What the scripts do and which clause each serves stands at the head of every file in `lua/`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from leasehold.contracts.bullmq import job_options, submission
from leasehold.contracts.bullmq.bell import Bell
from leasehold.contracts.bullmq.claimed import Claimed, token_h_of
from leasehold.contracts.bullmq.options import CONTRACT, Options, client_name, keys
from leasehold.contracts.bullmq.outcomes import settle_args, verdict_of
from leasehold.contracts.bullmq.records import number
from leasehold.contracts.bullmq.scheduling import Scheduler
from leasehold.core.errors import LeaseLost, UsageError
from leasehold.core.idempotency import short_hash
from leasehold.core.job import NewJob, Submitted
from leasehold.core.lease import Lease, Report
from leasehold.core.outcome import COMPLETED, Failure, Outcome, Verdict
from leasehold.core.seam import Upkeep
from leasehold.store.redis import Arg, Redis
from leasehold.store.scripts import load_scripts

SCRIPTS = load_scripts("leasehold.contracts.bullmq")

_BATCH_MAX = 500
_HELD_MAX = 100_000
_WORKER_ID_UNSAFE = re.compile(r"[^A-Za-z0-9_.:@-]")
# Events of BullMQ's own that say where a job stands: a handler's news must not look like them.
RESERVED_EVENTS = frozenset(
    (
        *("added", "waiting", "active", "completed", "failed", "delayed", "drained", "paused"),
        *("resumed", "removed", "stalled", "retries-exhausted", "waiting-children", "duplicated"),
        *("deduplicated", "cleaned", "debounced", "retry"),
    )
)


class BullmqQueue:
    """A queue of the contract, for one event loop. `worker_id` is the name it works under."""

    def __init__(
        self, redis: Redis, options: Options, *, worker_id: str = "", url: str = ""
    ) -> None:
        self._redis = redis
        self._options = options
        self._keys = keys(options.key_prefix)
        self.worker_id = _WORKER_ID_UNSAFE.sub("-", worker_id) or f"anon-{secrets.token_hex(6)}"
        self._token = secrets.token_urlsafe(16)
        self._token_h = short_hash(self._token.encode())
        self._held: dict[str, None] = {}
        self._answer_lost = False
        self._search_at = 0.0
        self._asking = asyncio.Lock()
        # Connections that block carry the worker's name: that is how Node's getWorkers() finds it.
        named = client_name(options, options.name or self.worker_id)
        self._bell = Redis(url, name=named) if url else redis
        self._announced = not url
        self._marker = Bell(self._bell, self._keys[7])
        self._scheduler = Scheduler(redis, options.key_prefix, self._keys)

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job it stands for."""
        answers: list[Submitted | None] = [None] * len(jobs)
        accepted: list[int] = []
        rows: list[tuple[Arg, ...]] = []
        for position, job in enumerate(jobs):
            try:
                rows.append(submission.row(job, self._options))
                accepted.append(position)
            except UsageError as error:
                answers[position] = Submitted(job.job_id, "invalid", str(error))
        for start in range(0, len(accepted), _BATCH_MAX):
            args = [part for row in rows[start : start + _BATCH_MAX] for part in row]
            replies = await self._run(
                "add", "", self._options.max_depth, self._options.idempotency_ttl_s * 1000, *args
            )
            for position, (status, job_id) in zip(
                accepted[start : start + _BATCH_MAX], replies, strict=True
            ):
                answers[position] = submission.answer(
                    status.decode(), job_id.decode(), self._options
                )
        return [answer for answer in answers if answer is not None]

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; waits where BullMQ's workers do, and is woken as they are."""
        if limit < 1:
            return []
        if not self._announced:
            await self._announce()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            async with self._asking:  # one at a time: a call under way is not a lost answer
                state, now, due, limited_ms, last, rows = await self._claim_once(limit)
                leases = [self._lease(row, now + self._options.lease_ms) for row in rows]
            if leases:
                if any(len(row) > 7 and row[11] for row in rows):
                    leases = await self._fail_decided(leases, rows)
                    if not leases:
                        continue
                await self._follow_schedules(rows)
                return leases
            remaining_ms = (deadline - loop.time()) * 1000
            if remaining_ms <= 0:
                return []
            if limited_ms:
                await asyncio.sleep(min(remaining_ms, limited_ms) / 1000)
            elif state == b"paused":
                await self._listen_paused(last, remaining_ms)
            else:
                wait = min(remaining_ms, due - now) if due else remaining_ms
                await self._marker.wait(wait / 1000, until_ms=now + wait)

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Renew locks; asks for little when most of the lease is left."""
        answers: list[Lease | LeaseLost] = []
        for start in range(0, len(leases), _BATCH_MAX):
            chunk = leases[start : start + _BATCH_MAX]
            args: list[Arg] = []
            for lease in chunk:
                args += (lease.job_id, lease.fence, lease.token, lease.attempt, token_h_of(lease))
            replies = await self._run("extend", self.worker_id, self._options.lease_ms, *args)
            answers += [_extended(*pair) for pair in zip(chunk, replies, strict=True)]
        return answers

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Write progress and publish events to the queue's followers."""
        for report in reports:
            check_report(report)
        answers: list[LeaseLost | None] = []
        for start in range(0, len(reports), _BATCH_MAX):
            chunk = reports[start : start + _BATCH_MAX]
            args: list[Arg] = []
            for each in chunk:
                lease = each.lease
                args += (lease.job_id, lease.fence, lease.token, each.type, each.progress)
                args += (each.step, each.data, token_h_of(lease))
            replies = await self._run("report", self.worker_id, *args)
            answers += [
                None if reply[0] == b"ok" else LeaseLost(each.lease.job_id, reply[1].decode())
                for each, reply in zip(chunk, replies, strict=True)
            ]
        return answers

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: one step for the whole batch, a verdict for each.

        Plain completions take a shorter way; what turns out not to be plain goes the whole one.
        """
        verdicts: list[Verdict | None] = [None] * len(outcomes)
        plain: list[int] = []
        rest: list[int] = []
        for position, outcome in enumerate(outcomes):
            (plain if self._is_plain(outcome) else rest).append(position)
        for start in range(0, len(plain), _BATCH_MAX):
            rest += await self._complete(outcomes, plain[start : start + _BATCH_MAX], verdicts)
        for start in range(0, len(rest), _BATCH_MAX):
            await self._settle(outcomes, rest[start : start + _BATCH_MAX], verdicts)
        for outcome in outcomes:
            self._held.pop(outcome.lease.job_id, None)
        return verdicts  # type: ignore[return-value]

    async def upkeep(self) -> Upkeep:
        """Promote, take back, trim; every worker may do it as often as it likes."""
        options = self._options
        reply = await self._run(
            "upkeep",
            options.stalled_max,
            options.stalled_ms,
            options.journal_length,
            round(options.journal_days * 86_400_000),
        )
        return Upkeep(*reply)

    async def close(self) -> None:
        """Close the connections."""
        await self._marker.close()
        await self._redis.close()
        if self._bell is not self._redis:
            await self._bell.close()

    async def _run(self, name: str, *args: Arg) -> Any:
        return await self._redis.run(SCRIPTS[name], self._keys, (self._options.key_prefix, *args))

    async def _announce(self) -> None:
        """Open the connection that carries the worker's name: it is seen before it waits."""
        self._announced = True
        await self._bell.block("PING", wait_ms=1_000)

    async def _claim_once(self, limit: int) -> Any:
        recover = self._answer_lost
        # Set before asking: whatever ends this call early, the next one looks for what it took.
        self._answer_lost = True
        options = self._options
        search = self._time_to_search()
        args: tuple[Arg, ...] = (
            self._token,
            self.worker_id,
            min(limit, _BATCH_MAX),
            options.lease_ms,
            options.stalled_max,
            options.limit_max or "",
            options.limit_ms or "",
            self._token_h,
        )
        reply = 0
        if not (recover or search or options.limit_max):
            reply = await self._run("take", *args)
        if not reply:
            held = self._held if recover else ()
            reply = await self._run("claim", *args, int(search), int(recover), *held)
        self._answer_lost = False
        return reply

    def _time_to_search(self) -> bool:
        """Now and then a claim also looks for locks that ran out; upkeep does it as well."""
        now = asyncio.get_running_loop().time()
        if now < self._search_at:
            return False
        self._search_at = now + min(1.0, self._options.lease_ms / 4_000)
        return True

    async def _fail_decided(self, leases: Sequence[Lease], rows: Sequence[Any]) -> list[Lease]:
        """A failure that was decided elsewhere ends the job at pickup (B-17): it was lost too
        often, a child failed, or a cancel was asked for. Returns the leases that are left."""
        ends: list[Outcome] = []
        for lease, row in zip(leases, rows, strict=True):
            if len(row) > 7 and row[11]:
                reason = row[11].decode(errors="replace")
                cancelled = reason == "cancelled"
                code = "lease_lost" if "stalled" in reason else "child"
                failure = Failure(
                    code=reason if cancelled else code, message=reason, retryable=False
                )
                ends.append(Outcome(lease, "cancel" if cancelled else "bury", failure=failure))
        await self.settle(ends)
        ended = {outcome.lease.job_id for outcome in ends}
        return [lease for lease in leases if lease.job_id not in ended]

    async def _follow_schedules(self, rows: Sequence[Any]) -> None:
        """A job that a scheduler made leads to the next one, whoever picks it up (B-39)."""
        for row in rows:
            if len(row) > 7 and row[10]:
                await self._scheduler.follow(row[10].decode(), row[0].decode(), row[3])

    async def _listen_paused(self, last: bytes, wait_ms: float) -> None:
        """While paused, the events are heard: a resume, and a 5.x client that adds a job (B-34)."""
        wait = max(1, int(wait_ms))
        await self._bell.block(
            "XREAD", "COUNT", 1, "BLOCK", wait, "STREAMS", self._keys[6], last, wait_ms=wait
        )

    def _is_plain(self, outcome: Outcome) -> bool:
        if outcome.kind != "complete" or outcome.lease.token != self._token:
            return False
        claimed = outcome.lease.extra
        options = self._options
        return (
            isinstance(claimed, Claimed)
            and not claimed.attempts_made
            and not claimed.options.keeps
            and options.keep_completed < 0
            and not options.metrics_minutes
        )

    async def _complete(
        self, outcomes: Sequence[Outcome], chunk: list[int], verdicts: list[Verdict | None]
    ) -> list[int]:
        """Settle plain completions; returns the positions of those that are not plain after all."""
        args: list[Arg] = []
        for position in chunk:
            outcome = outcomes[position]
            lease, result = outcome.lease, outcome.result
            args += (lease.job_id, lease.fence, result, short_hash(result), lease.task)
            args.append(lease.priority)
        head = (self.worker_id, self._token, self._token_h)
        replies = await self._run("complete", *head, *args)
        others = []
        for position, is_done in zip(chunk, replies, strict=True):
            if is_done:
                verdicts[position] = COMPLETED
            else:
                others.append(position)
        return others

    async def _settle(
        self, outcomes: Sequence[Outcome], chunk: list[int], verdicts: list[Verdict | None]
    ) -> None:
        args: list[Arg] = []
        for position in chunk:
            outcome = outcomes[position]
            args += settle_args(outcome, self._options, token_h_of(outcome.lease))
        replies = await self._run("settle", self.worker_id, self._options.metrics_minutes, *args)
        for position, reply in zip(chunk, replies, strict=True):
            verdicts[position] = verdict_of(outcomes[position].lease, reply)

    def _lease(self, row: list[Any], lease_until_ms: int) -> Lease:
        job_id = row[0].decode()
        self._held[job_id] = None
        if len(self._held) > _HELD_MAX:  # only leases that were lost unsettled stay here
            del self._held[next(iter(self._held))]
        options = job_options.read(row[3])
        made, stalled, stack = _history(row)
        attempts = options.attempts or self._options.max_attempts
        return Lease(
            job_id=job_id,
            queue=self._options.queue,
            task=row[1].decode(errors="replace"),
            payload=row[2],
            # A stalled start is no attempt to BullMQ: it raises the count and the limit alike.
            attempt=made + stalled + 1,
            max_attempts=attempts + stalled if attempts else 0,
            fence=int(row[4]),
            token=self._token,
            lease_until_ms=lease_until_ms,
            lease_ms=self._options.lease_ms,
            created_ms=number(row[5]),
            priority=number(row[6]),
            trace=options.trace,
            extra=Claimed(made, stalled, options, stack, self._token_h),
        )


def _history(row: list[Any]) -> tuple[int, int, bytes]:
    """Ended attempts, stalled starts and earlier stacks, which only a job with a history has."""
    return (int(row[7]), int(row[8]), row[9]) if len(row) > 7 else (0, 0, b"")


def check_report(report: Report) -> None:
    """Refuse news that BullMQ's readers would take for something else (B-30)."""
    if report.type in RESERVED_EVENTS:
        raise UsageError(
            f"a handler cannot report {report.type!r}: that is an event of BullMQ's own; "
            "return, raise, or use another name",
            contract=CONTRACT,
        )
    if report.progress and report.progress.lstrip(b"-").isdigit():
        percent = int(report.progress)
        if not 0 <= percent <= 100:
            raise UsageError(
                f"progress {percent}: a whole number is a percentage, 0 to 100; "
                "anything else goes as an object",
                contract=CONTRACT,
            )


def _extended(lease: Lease, reply: list[Any]) -> Lease | LeaseLost:
    if reply[0] != b"ok":
        return LeaseLost(lease.job_id, reply[1].decode())
    return msgspec.structs.replace(
        lease, lease_until_ms=reply[1], cancel_requested=bool(reply[2]), lease_ms=reply[3]
    )


__all__ = ["SCRIPTS", "BullmqQueue"]
