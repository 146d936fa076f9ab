"""The `streams` contract on the seam: Redis Streams as the queue, one script for every step.

A job is a hash, its news a stream of its own, and its turn an entry of `jobs:stream`, which a
worker reads through the group `workers`. The pending entry is the lease; the hash holds the fence.
What the scripts do and which clause each serves stands at the head of every file in `lua/`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import msgspec

from tenure.contracts.streams.given import leases_of, settle_rows
from tenure.contracts.streams.options import CONTRACT, GROUP, Options, keys
from tenure.contracts.streams.submission import ARGS, answer, submit_args
from tenure.core.errors import LeaseLost, ServerError, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import (
    BURIED,
    CANCELLED,
    COMPLETED,
    RELEASED,
    Outcome,
    Retried,
    Verdict,
)
from tenure.core.retry import exponential
from tenure.core.seam import Quarantined, Upkeep
from tenure.store.redis import Arg, Redis
from tenure.store.resending import part
from tenure.store.scripts import ScriptFolder
from tenure.store.wire import is_wrong_type

SCRIPTS = ScriptFolder("tenure.contracts.streams")
TERMINAL_EVENTS = frozenset({"done", "error", "canceled"})

_HOLDERS = ("claim", "settle", "extend")
_HELD_MAX = 100_000
_QUARANTINED_MAX = 1_000  # for callers that never ask
_CONSUMER_AGE_MS = 3_600_000
_BATCH_MAX = 500
_NEVER_MS = 10**9
_WORKER_ID_UNSAFE = re.compile(r"[^A-Za-z0-9_.:@-]")
_VERDICTS: dict[bytes, Verdict] = {
    b"complete": COMPLETED,
    b"bury": BURIED,
    b"release": RELEASED,
    b"cancel": CANCELLED,
}


class _Dry(NamedTuple):
    """Nothing was left to take. `places`: keys and positions behind which news would show."""

    places: tuple[Arg, ...]
    due_s: float

    def quiet_ms(self) -> int:
        """How long nothing will become claimable by itself, rounded up."""
        return ceil((self.due_s - asyncio.get_running_loop().time()) * 1000)


class StreamsQueue:
    """A queue of the contract, for one event loop. `worker_id` is the consumer it claims as."""

    claim_max = _BATCH_MAX

    def __init__(self, redis: Redis, options: Options, *, worker_id: str = "") -> None:
        self._redis = redis
        self._options = options
        self._keys = keys(options.namespace)
        # The id stands inside JSON that a script writes, so it keeps to harmless characters.
        self.worker_id = _WORKER_ID_UNSAFE.sub("-", worker_id) or f"anon-{secrets.token_hex(6)}"
        self.slots = 0
        self._held: dict[str, None] = {}
        # One claim at a time: a second one could not tell what the first is about to hold.
        self._claiming: asyncio.Future[None] | None = None
        self._listening = False
        self._dry: _Dry | None = None
        self._woken = b"0-0"
        self._answer_lost = False
        self._instance = secrets.token_hex(4)
        self._claims = 0
        self._loaded = False
        self._quarantined: list[Quarantined] = []
        self._backoff = exponential(options.retry_delay_ms, jitter="equal")

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job it stands for."""
        answers: list[Submitted | None] = [None] * len(jobs)
        accepted: list[int] = []
        args: list[Arg] = []
        for position, job in enumerate(jobs):
            try:
                args += submit_args(job, self._options)
                accepted.append(position)
            except UsageError as error:
                answers[position] = Submitted("", "invalid", str(error))
        for start in range(0, len(accepted), _BATCH_MAX):
            chunk = accepted[start : start + _BATCH_MAX]
            submit = self._run(
                "submit",
                self._options.max_depth,
                self._options.idempotency_ttl_s,
                *args[start * ARGS : (start + len(chunk)) * ARGS],
            )
            replies = await part(start, submit)
            for position, reply in zip(chunk, replies, strict=True):
                answers[position] = answer(reply, self._options)
        return [each for each in answers if each is not None]

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
        answers: list[Lease | LeaseLost] = []
        for start in range(0, len(leases), _BATCH_MAX):
            chunk = leases[start : start + _BATCH_MAX]
            args = [arg for lease in chunk for arg in (*_proof(lease), lease.task)]
            replies = await part(start, self._run("extend", self._options.lease_ms, *args))
            answers += [_extended(*pair) for pair in zip(chunk, replies, strict=True)]
        return answers

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Append events to the streams of running jobs."""
        answers: list[LeaseLost | None] = []
        for report in reports:
            if report.type in TERMINAL_EVENTS:
                raise UsageError(
                    f"a handler cannot report {report.type!r}: followers stop at "
                    "done, error and canceled; return or raise instead",
                    contract=CONTRACT,
                )
        for start in range(0, len(reports), _BATCH_MAX):
            chunk = reports[start : start + _BATCH_MAX]
            args: list[Arg] = []
            for report in chunk:
                args += (*_proof(report.lease), report.lease.task, report.type, report.step)
                args += (report.data, report.progress)
            told = await part(start, self._run("report", *args))
            replies = self._without_aside(told, len(chunk))
            answers += [
                None if reply[0] == b"ok" else _lost(report.lease, reply[1])
                for report, reply in zip(chunk, replies, strict=True)
            ]
        return answers

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: hash, terminal event and acknowledgement in one step each."""
        verdicts: list[Verdict] = []
        for start in range(0, len(outcomes), _BATCH_MAX):
            chunk = outcomes[start : start + _BATCH_MAX]
            reply = await part(start, self._run("settle", *settle_rows(chunk, self._backoff)))
            if reply != len(chunk):
                reply = self._without_aside(reply, len(chunk))
            verdicts += _verdicts(chunk, reply)
            for outcome in chunk:
                self._held.pop(outcome.lease.handle, None)
        return verdicts

    async def upkeep(self) -> Upkeep:
        """Promote, take back, trim; every worker may do it as often as it likes."""
        options = self._options
        reply = await self._run(
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
        *counts, aside = reply
        self._set_aside(aside)
        return Upkeep(*counts)

    def take_quarantined(self) -> list[Quarantined]:
        """What was set aside since the last call."""
        taken, self._quarantined = self._quarantined, []
        return taken

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _run(self, name: str, *args: Arg) -> Any:
        return await self._redis.run(SCRIPTS[name], self._keys, (self._options.namespace, *args))

    async def _their_turn(self, claiming: asyncio.Future[None], left_ms: int) -> bool:
        """Let another call of this instance go first; False when ours is over before it is.

        That happens only if the other one listens. What it does not hear of is not there to take.
        """
        timeout_s = left_ms / 1000 if self._listening else None
        done, _ = await asyncio.wait([claiming], timeout=timeout_s)
        return bool(done)

    async def _claim_once(self, limit: int, left_ms: int) -> list[Lease]:
        """One call of the script, at once or, where nothing was left, when something comes."""
        if not self._loaded:  # whoever claims will settle, and his first outcomes shall not wait
            await self._redis.load(SCRIPTS[name] for name in _HOLDERS)
            self._loaded = True
        recover = self._answer_lost
        self._claims += 1
        args = (
            self._options.namespace,
            self.worker_id,
            min(limit, _BATCH_MAX),
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
        dry, self._dry = self._dry, None
        listen_ms = 0 if dry is None else min(left_ms, dry.quiet_ms())
        if dry is None or listen_ms < 1:
            reply = await self._redis.run(SCRIPTS["claim"], self._keys, args)
        else:
            reply = await self._listen(dry, listen_ms, args)
            if reply is None:
                return []
        self._answer_lost = False
        state, now, last, woken, due, groups, aside = reply
        self._set_aside(aside)
        self._woken = woken or self._woken
        if last:
            self._dry = self._dried(state, last, int(due) - now if due != b"0" else _NEVER_MS)
        return self._leases(groups, now)

    async def _listen(self, dry: _Dry, wait_ms: int, args: Sequence[Arg]) -> Any:
        """Claim when something is added to the stream, somebody calls, or the time is up.

        None when a key to listen on holds something else. The script has moved it away; what it
        took besides is found by the next claim.
        """
        blocking = ("XREAD", "COUNT", 1, "BLOCK", wait_ms, "STREAMS", *dry.places)
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

    def _dried(self, state: bytes, last: bytes, quiet_ms: int) -> _Dry:
        stream, wake = self._keys[0], self._keys[3]
        due_s = asyncio.get_running_loop().time() + quiet_ms / 1000
        if state == b"paused":  # nothing is handed out, whatever is added or due
            return _Dry((wake, self._woken), due_s + _NEVER_MS)
        return _Dry((stream, wake, last, self._woken), due_s)

    def _set_aside(self, pairs: list[bytes]) -> None:
        for job_id, reason in zip(pairs[::2], pairs[1::2], strict=True):
            self._quarantined.append(Quarantined(job_id.decode(errors="replace"), reason.decode()))
        del self._quarantined[:-_QUARANTINED_MAX]

    def _without_aside(self, replies: list[Any], count: int) -> list[Any]:
        """The answers to so many items; what was set aside meanwhile stands behind them."""
        if len(replies) > count:
            self._set_aside(replies.pop())
        return replies

    def _leases(self, groups: list[Any], now: int) -> list[Lease]:
        held = self._held
        leases = leases_of(groups, token=self.worker_id, now=now, lease_ms=self._options.lease_ms)
        for lease in leases:
            held[lease.handle] = None
        while len(held) > _HELD_MAX:  # only leases that were lost unsettled stay here
            del held[next(iter(held))]
        return leases


def _proof(lease: Lease) -> tuple[Arg, ...]:
    return (lease.job_id, lease.handle, lease.fence, lease.token)


def _lost(lease: Lease, reason: bytes) -> LeaseLost:
    return LeaseLost(lease.job_id, reason.decode(errors="replace"))


def _extended(lease: Lease, reply: list[Any]) -> Lease | LeaseLost:
    if reply[0] != b"ok":
        return _lost(lease, reply[1])
    return msgspec.structs.replace(
        lease, lease_until_ms=reply[1], cancel_requested=bool(reply[2]), lease_ms=reply[3]
    )


def _verdicts(outcomes: Sequence[Outcome], reply: Any) -> list[Verdict]:
    """The script tells only their number when all were plainly completed."""
    if reply == len(outcomes):
        return [COMPLETED] * len(outcomes)
    pairs = zip(outcomes, reply, strict=True)
    return [_verdict(outcome.lease, each) for outcome, each in pairs]


def _verdict(lease: Lease, reply: Any) -> Verdict:
    if reply == b"complete":
        return COMPLETED
    code = reply[0]
    if code == b"lost":
        return _lost(lease, reply[1])
    if code == b"retry":
        return Retried(reply[1])
    return _VERDICTS[code]


__all__ = ["GROUP", "SCRIPTS", "TERMINAL_EVENTS", "StreamsQueue"]
