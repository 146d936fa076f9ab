"""Taking leases: one claim at a time, none lost with its answer, and waiting without polling much.

Our own publishers ring a bell, the stream `{queue}:wake`; other OmniQ clients do not, so a waiting
claim also looks every `poll_ms`. The blocking read on the bell stays pending between two looks.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from tenure.contracts.omniq.calls import Calls
from tenure.contracts.omniq.options import Options, lost, queue_base
from tenure.contracts.omniq.repair import repair
from tenure.contracts.omniq.submission import (
    Publication,
    Shapes,
    answers,
    from_new_job,
    script_args,
)
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.idempotency import short_hash
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import (
    BURIED,
    CANCELLED,
    COMPLETED,
    RELEASED,
    Failure,
    Outcome,
    Retried,
    Verdict,
)
from tenure.core.quarantine import Quarantined
from tenure.core.seam import Upkeep
from tenure.store.redis import Arg, Redis
from tenure.store.resending import part

BATCH_MAX = 500
_TEND_MAX = 100
_HELD_MAX = 100_000
_TOLD_MAX = 1_000
_BLOCK_MS = 5_000
_PAUSED_POLL_MS = 200


class Claimer:
    """Claims for one instance of a queue.

    `held` are the ids of leases that it knows of, `quarantined` records that were set aside and
    are not logged yet.
    """

    def __init__(self, calls: Calls, options: Options, worker_id: str) -> None:
        self.held: dict[str, None] = {}
        self.quarantined: list[Quarantined] = []
        self._calls = calls
        self._options = options
        self._worker_id = worker_id
        self._bell = Bell(calls.redis, f"{queue_base(options.queue)}:wake")
        # One claim at a time: a second one could not tell what the first is about to hold.
        self._asking = asyncio.Lock()
        self._answer_lost = False
        self._number = 0

    async def once(self, limit: int, *, now_ms: int = 0, tends: bool = True) -> Any:
        """One claim: (state, now_ms, last wake id, next due_ms, lease rows, news)."""
        async with self._asking:
            recover = self._answer_lost
            self._number += 1
            # Set before asking: whatever ends this call early, the next one undoes what it took.
            self._answer_lost = True
            reply = await self._calls.run(
                "claim",
                now_ms,
                self._worker_id,
                min(limit, BATCH_MAX),
                self._calls.instance,
                self._number,
                secrets.token_hex(16),
                _TEND_MAX if tends else 0,
                chance(),
                self._options.keep_completed,
                self._options.keep_failed,
                int(recover),
                *(self.held if recover else ()),
            )
            self._answer_lost = False
            self.told(reply[5])
            for row in reply[4]:
                self._hold(row[0].decode())
            return reply

    async def wait(self, limit: int, wait_ms: int) -> list[Any]:
        """Lease rows, at least one unless `wait_ms` runs out first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            state, now, woken, due, rows, _ = await self.once(limit)
            left_ms = (deadline - loop.time()) * 1000
            if rows or left_ms <= 0:
                return list(rows)
            poll_ms = _PAUSED_POLL_MS if state == b"paused" else self._options.poll_ms
            if due and state == b"ok":
                poll_ms = min(poll_ms, max(1, due - now))
            await self._bell.wait(min(left_ms, poll_ms), woken)

    def told(self, rows: list[bytes]) -> None:
        """A script set something aside."""
        parts = (row.decode(errors="replace").partition("\n") for row in rows)
        self.quarantined += [Quarantined(job_id, reason) for job_id, _, reason in parts]
        del self.quarantined[:-_TOLD_MAX]  # without a reader the latest are kept

    def take_quarantined(self) -> list[Quarantined]:
        """What was set aside since the last call."""
        taken, self.quarantined = self.quarantined, []
        return taken

    def release(self, job_id: str) -> None:
        """The lease is over."""
        self.held.pop(job_id, None)

    async def close(self) -> None:
        """Stop waiting."""
        await self._bell.close()

    def _hold(self, job_id: str) -> None:
        self.held[job_id] = None
        if len(self.held) > _HELD_MAX:  # only leases that were lost unsettled stay here
            del self.held[next(iter(self.held))]


class Bell:
    """Waits for the next entry of a wake stream; one blocking read serves many waits."""

    def __init__(self, redis: Redis, key: str) -> None:
        self._redis = redis
        self._key = key
        self._pending: asyncio.Task[Any] | None = None

    async def wait(self, wait_ms: float, last: bytes) -> None:
        """Return when somebody rings after `last`, or when the time is up."""
        if last == b"0-0" and self._pending is None:
            last = b"0"
        task = self._pending
        if task is None or task.done():
            task = self._pending = asyncio.create_task(self._listen(last))
        done, _ = await asyncio.wait({task}, timeout=wait_ms / 1000)
        if done and task.exception() is not None:
            self._pending = None
            await asyncio.sleep(min(wait_ms, 50) / 1000)  # the next claim tells what is wrong

    async def close(self) -> None:
        """Give up the read."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    async def _listen(self, last: bytes) -> Any:
        return await self._redis.block(
            "XREAD", "COUNT", 1, "BLOCK", _BLOCK_MS, "STREAMS", self._key, last, wait_ms=_BLOCK_MS
        )


def chance() -> float:
    """A random number for a script's jitter: a script has none of its own."""
    return secrets.randbelow(1_000_000) / 1_000_000


_NULL_H = short_hash(b"null")
_ERROR_BYTES_MAX = 4096
_VERDICTS: dict[bytes, Verdict] = {
    b"bury": BURIED,
    b"release": RELEASED,
    b"cancel": CANCELLED,
}


def settle_args(outcome: Outcome) -> tuple[Arg, ...]:
    """What the script takes for one outcome."""
    lease = outcome.lease
    if outcome.kind == "complete":
        result = outcome.result
        result_h = _NULL_H if result == b"null" else short_hash(result)
        return (
            lease.job_id, lease.token, lease.fence, "complete", 0, result, result_h, "", "", "",
        )  # fmt: skip
    said, as_json, code = failure_args(outcome.failure)
    return (
        lease.job_id, lease.token, lease.fence, outcome.kind, outcome.delay_ms, "", "", said,
        as_json, code,
    )  # fmt: skip


def failure_args(failure: Failure | None) -> tuple[Arg, Arg, Arg]:
    """An error for people (what OmniQ calls `last_error`), for programs, and its code alone."""
    if failure is None:
        return "", "", ""
    said = f"{failure.code}: {failure.message}".encode()[:_ERROR_BYTES_MAX]
    code = "".join(failure.code.split())[:80]
    return said.decode(errors="ignore"), msgspec.json.encode(failure), code


def verdict_of(lease: Lease, reply: Any) -> Verdict:
    """The seam's verdict for the script's."""
    if reply == 1:
        return COMPLETED
    kind, detail = reply
    if kind == b"lost":
        return lost(lease.job_id, detail)
    if kind == b"retry":
        return Retried(detail)
    return _VERDICTS[kind]


_WORKER_AGE_MS = 3_600_000
_WORKER_ID_UNSAFE = re.compile(r"[^A-Za-z0-9_.:@-]")
# Words that followers take for a state of the job.
RESERVED_EVENTS = frozenset({"wait", "active", "delayed", "completed", "failed"})


class OmniqQueue:
    """A queue of the contract, for one event loop. `worker_id` is the name it works under."""

    claim_max = BATCH_MAX

    def __init__(self, redis: Redis, options: Options, *, worker_id: str = "") -> None:
        self._redis = redis
        self._options = options
        self.name = options.queue
        self._task = options.task or options.queue
        # The id stands between blanks in a field of the job, so it keeps to harmless characters.
        self.worker_id = _WORKER_ID_UNSAFE.sub("-", worker_id) or f"anon-{secrets.token_hex(6)}"
        self.lease_ms = options.timeout_ms
        self.slots = 0
        self._calls = Calls(redis, options.queue)
        self._claimer = Claimer(self._calls, options, self.worker_id)

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job it stands for."""
        told: list[Submitted | None] = [None] * len(jobs)
        accepted: list[int] = []
        rows: list[Publication] = []
        shapes = Shapes(self._options)
        for position, job in enumerate(jobs):
            try:
                rows.append(from_new_job(job, shapes))
                accepted.append(position)
            except UsageError as error:
                told[position] = Submitted("", "invalid", str(error))
        for start in range(0, len(accepted), BATCH_MAX):
            chunk = rows[start : start + BATCH_MAX]
            publish = self._calls.remembered(
                "publish",
                (0,),
                self._options.max_depth,
                self._options.idempotency_ttl_s * 1000,
                *script_args(chunk),
            )
            reply = await part(start, publish)
            for position, answer in zip(
                accepted[start : start + BATCH_MAX],
                answers(reply, chunk, self._options),
                strict=True,
            ):
                told[position] = answer
        return [each for each in told if each is not None]

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; woken by our publishers, and looking often for others'."""
        if limit < 1:
            return []
        return [self._lease(row) for row in await self._claimer.wait(limit, wait_ms)]

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases for the job's whole timeout from now; writes nothing while most is left."""
        answers: list[Lease | LeaseLost] = []
        for start in range(0, len(leases), BATCH_MAX):
            chunk = leases[start : start + BATCH_MAX]
            args: list[Arg] = []
            for lease in chunk:
                args += (lease.job_id, lease.token, lease.fence)
            replies = await part(start, self._calls.run("extend", 0, self.worker_id, 1, *args))
            answers += [_extended(*pair) for pair in zip(chunk, replies, strict=True)]
        return answers

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Append to the jobs' own event streams, and keep their progress."""
        for report in reports:
            if report.type in RESERVED_EVENTS:
                raise UsageError(
                    f"a handler cannot report {report.type!r}: followers take it for the job's "
                    "state; choose another word"
                )
        answers: list[LeaseLost | None] = []
        for start in range(0, len(reports), BATCH_MAX):
            chunk = reports[start : start + BATCH_MAX]
            args: list[Arg] = []
            for report in chunk:
                lease = report.lease
                args += (lease.job_id, lease.token, lease.fence)
                args += (report.type, report.step, report.data, report.progress)
            replies = await part(start, self._calls.run("report", 0, self.worker_id, *args))
            answers += [
                None if reply == 1 else lost(report.lease.job_id, reply[1])
                for report, reply in zip(chunk, replies, strict=True)
            ]
        return answers

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: one step for the whole batch, a verdict for each."""
        verdicts: list[Verdict] = []
        for start in range(0, len(outcomes), BATCH_MAX):
            chunk = outcomes[start : start + BATCH_MAX]
            args: list[Arg] = []
            for outcome in chunk:
                args += settle_args(outcome)
            settle = self._calls.remembered(
                "settle",
                (0, self.worker_id),
                self._options.keep_completed,
                self._options.keep_failed,
                chance(),
                "",
                *args,
            )
            replies = await part(start, settle)
            for outcome, reply in zip(chunk, replies, strict=True):
                self._claimer.release(outcome.lease.job_id)
                verdicts.append(verdict_of(outcome.lease, reply))
        return verdicts

    async def upkeep(self) -> Upkeep:
        """Promote, take back, trim; every worker may do it as often as it likes."""
        options = self._options
        reply = await self._calls.run(
            "upkeep",
            0,
            self.worker_id,
            chance(),
            options.journal_bytes,
            round(options.journal_days * 86_400_000),
            _WORKER_AGE_MS,
            options.keep_completed,
            options.keep_failed,
            self.slots,
            round(max(options.journal_days, options.unread_days) * 86_400_000),
        )
        self._claimer.told(reply[6])
        if reply[5]:
            await repair(self._calls, options.queue)
        return Upkeep(*reply[:5])

    def take_quarantined(self) -> list[Quarantined]:
        """Records that could not be read and were set aside since the last call."""
        return self._claimer.take_quarantined()

    async def close(self) -> None:
        """Close the connections."""
        await self._claimer.close()
        await self._redis.close()

    def _lease(self, row: list[Any]) -> Lease:
        job_id, payload, until, attempt, max_attempts, gid, token, fence, task, *rest = row
        created, trace, lease_ms = rest
        return Lease(
            job_id=job_id.decode(),
            queue=self._options.queue,
            task=task.decode(errors="replace") or self._task,
            payload=payload,
            attempt=attempt,
            max_attempts=max_attempts,
            fence=fence,
            token=token.decode(),
            lease_until_ms=until,
            lease_ms=lease_ms,
            created_ms=created,
            gid=gid.decode(errors="replace"),
            trace=trace.decode(errors="replace"),
        )


def _extended(lease: Lease, reply: list[Any]) -> Lease | LeaseLost:
    if reply[0] == b"lost":
        return lost(lease.job_id, reply[1])
    return msgspec.structs.replace(
        lease, lease_until_ms=reply[0], cancel_requested=bool(reply[1]), lease_ms=reply[2]
    )
