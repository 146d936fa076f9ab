"""What the contracts on Redis share: opening a queue, batches, verdicts, claims, reading, a ledger.

A contract's `queue.py` adds its scripts to this, and its `ledger.py` extends `RedisLedger`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tenure.core.errors import LeaseLost, ServerError, UsageError
from tenure.core.job import JobEvent, JobRecord, NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure
from tenure.core.registry import QueueUrl
from tenure.core.seam import (
    PAGE_BYTES,
    READ_STEP,
    Page,
    Quarantined,
    Query,
    WorkerBeat,
    weight,
)
from tenure.store.redis import Arg, Redis, is_wrong_type
from tenure.store.resend import run_step

BATCH_MAX = 500
"""How many jobs one script call takes: a longer call would block the server's other clients."""
WORKER_ALIVE_MS = 15_000
INDEX_STEP = 200

_ERROR_CODE_MAX = 80
_NUMBER_MAX = 10**15
_QUARANTINED_MAX = 1_000  # where no worker calls `take`, the latest are kept
_HELD_MAX = 100_000
# One call of `find` reads no more jobs than this. Jobs of a rare state are found page by page.
_SCAN_MAX = 5_000
_WORKER_ID_UNSAFE = re.compile(r"[^A-Za-z0-9_.:@-]")

T = TypeVar("T")
R = TypeVar("R")
Options = TypeVar("Options", bound=msgspec.Struct)


def open_redis(url: QueueUrl, options: type[Options], example: str) -> tuple[Redis, Options]:
    """The server that a queue URL names, and the URL's options; connects on first use."""
    if not url.store:
        raise UsageError(f"{url.safe} names no server; write {example}", contract=url.contract)
    read, store = url.read(options)
    return Redis(store, name="tenure"), read


def safe_worker_id(worker_id: str) -> str:
    """A worker id that scripts can write between blanks or inside JSON; random if there is none."""
    return _WORKER_ID_UNSAFE.sub("-", worker_id) or f"anon-{secrets.token_hex(6)}"


# -- calls ----------------------------------------------------------------------------------------


async def in_batches(
    items: Sequence[T], send: Callable[[Sequence[T]], Awaitable[Iterable[R]]], size: int = BATCH_MAX
) -> list[R]:
    """Send the items in batches; the answers to all of them, in order."""
    answers = list(await send(items[:size])) if items else []
    for start in range(size, len(items), size):
        answers += await run_step(send(items[start : start + size]), executed_before=True)
    return answers


async def submit_valid(
    jobs: Sequence[NewJob],
    encode: Callable[[NewJob], T],
    send: Callable[[Sequence[T]], Awaitable[Iterable[Submitted]]],
) -> list[Submitted]:
    """Send the jobs that `encode` accepts; the answers to all jobs, in order."""
    answers: list[Submitted | None] = []
    encoded: list[T] = []
    for job in jobs:
        try:
            encoded.append(encode(job))
            answers.append(None)
        except UsageError as error:
            answers.append(Submitted("", "invalid", str(error)))
    stored = iter(await in_batches(encoded, send))
    return [next(stored) if answer is None else answer for answer in answers]


def check_reports(reports: Iterable[Report], reserved: Iterable[str], contract: str) -> None:
    """Refuse event types that followers read as a state of the job."""
    for report in reports:
        if report.type in reserved:
            raise UsageError(
                f"a handler cannot report {report.type!r}: followers take it for the job's state; "
                "return or raise instead, or choose another word",
                contract=contract,
            )


def extended(lease: Lease, until_ms: int, cancel: int, lease_ms: int) -> Lease:
    """A lease as the extend script left it."""
    return msgspec.structs.replace(
        lease, lease_until_ms=until_ms, cancel_requested=bool(cancel), lease_ms=lease_ms
    )


def error_code(failure: Failure | None) -> str:
    """The code as the journal stores it: one short word without separators."""
    return "" if failure is None else "".join(failure.code.split())[:_ERROR_CODE_MAX]


class Quarantine:
    """Records that scripts have set aside and the worker has not logged yet."""

    def __init__(self) -> None:
        self._records: list[Quarantined] = []

    def add(self, job_id: bytes, reason: bytes) -> None:
        """Remember one record."""
        self._records.append(Quarantined(_text(job_id), _text(reason)))
        del self._records[:-_QUARANTINED_MAX]

    def take(self) -> list[Quarantined]:
        """The records added since the last call."""
        taken, self._records = self._records, []
        return taken


class ClaimTracker:
    """The leases that one instance of a queue knows it holds, and the numbers of its claims.

    The server may execute a claim whose answer is then lost. The next claim says so and lists the
    leases that the instance knows of, and its script recovers the others. Claims take turns,
    because a second claim would not know which leases the first one is about to take. `blocks` is
    set while a claim waits for the first job of an empty queue.
    """

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.number = 0
        self.blocks = False
        self._turn: asyncio.Future[None] | None = None
        self._held: dict[str, None] = {}
        self._answer_lost = False

    async def take_turn(self, deadline_s: float = float("inf")) -> bool:
        """Wait until no other claim is under way; False if one still blocks at the deadline."""
        loop = asyncio.get_running_loop()
        while self._turn is not None:
            timeout_s = deadline_s - loop.time() if self.blocks else None
            done, _ = await asyncio.wait([self._turn], timeout=timeout_s)
            if not done:
                return False
        self._turn = loop.create_future()
        return True

    def end_turn(self) -> None:
        """Let the next claim begin."""
        if self._turn is not None:
            self._turn.set_result(None)
            self._turn = None

    def begin(self) -> tuple[int, Iterable[str]]:
        """Count one more claim; 1 and the leases held if the last answer was lost, else 0."""
        recover = self._answer_lost
        self.number += 1
        # Set before the call: if anything ends it early, the next claim recovers what it took.
        self._answer_lost = True
        return int(recover), tuple(self._held) if recover else ()

    def answered(self, handles: Iterable[str]) -> None:
        """The claim was answered, and these leases came with it."""
        self._answer_lost = False
        self._held.update(dict.fromkeys(handles))
        while len(self._held) > _HELD_MAX:  # leases that were lost and never settled pile up
            del self._held[next(iter(self._held))]

    def release(self, handle: str) -> None:
        """The lease has ended."""
        self._held.pop(handle, None)


# -- reading --------------------------------------------------------------------------------------


async def read_all(redis: Redis, commands: Sequence[Sequence[Arg]]) -> list[Any]:
    """Replies of a pipeline; None for a key of the wrong type, which a script will quarantine."""
    return [readable(reply) for reply in await redis.pipeline(commands)]


def readable(reply: Any) -> Any:
    """One reply of a pipeline; None for a key of the wrong type."""
    if isinstance(reply, ServerError):
        if not is_wrong_type(reply):
            raise reply
        return None
    return reply


async def read_hashes(
    redis: Redis, prefix: str, ids: Sequence[tuple[int, str]]
) -> AsyncIterator[tuple[int, str, Any]]:
    """Time, id and raw hash of each job, read in steps that bound the size of one reply."""
    for start in range(0, len(ids), READ_STEP):
        step = ids[start : start + READ_STEP]
        flats = await redis.pipeline([("HGETALL", prefix + job_id) for _, job_id in step])
        for (ms, job_id), flat in zip(step, flats, strict=True):
            yield ms, job_id, flat


async def index_after(redis: Redis, index: str, after: str) -> list[tuple[int, str]]:
    """The next members of a sorted set, highest score first; `after` is the cursor `score:member`.

    Fewer than `INDEX_STEP` only at the end. Many members may share a score, so the cursor names the
    member too.
    """
    if not after:
        return await _ranks(redis, index, 0)
    score, _, member = after.partition(":")
    cursor = (int(score), member)
    rank, own_score, higher = await read_all(
        redis,
        [
            ("ZREVRANK", index, member),
            ("ZSCORE", index, member),
            ("ZCOUNT", index, f"({score}", "+inf"),
        ],
    )
    if rank is not None and number(own_score) == cursor[0]:
        return await _ranks(redis, index, rank + 1)
    # The member of the cursor was removed, or a caller made the cursor up. So find the position by
    # comparing. The rank of a made-up cursor would show where a job of another requester is.
    start: int = higher or 0
    while ranks := await _ranks(redis, index, start):
        start += len(ranks)
        left = [each for each in ranks if each < cursor]
        if left:
            # Members with equal scores were skipped, so fill this step up from the next one.
            return left + (await _ranks(redis, index, start) if len(left) < INDEX_STEP else [])
    return []


async def _ranks(redis: Redis, index: str, start: int) -> list[tuple[int, str]]:
    command = ("ZREVRANGE", index, start, start + INDEX_STEP - 1, "WITHSCORES")
    flat = (await read_all(redis, [command]))[0] or ()
    return [(number(score), _text(member)) for member, score in _paired(flat)]


def check_query(
    query: Query, states: Sequence[str], cursor: re.Pattern[str], contract: str
) -> None:
    """Refuse states that the contract does not have, and cursors that no page contained."""
    unknown = set(query.states) - set(states)
    if unknown:
        raise UsageError(
            f"no such state: {', '.join(sorted(unknown))}; there are {', '.join(states)}",
            contract=contract,
        )
    if query.after and not cursor.fullmatch(query.after):
        raise UsageError(
            f"{query.after!r} is not a cursor; pass the `after` of the page before",
            contract=contract,
        )


def fields_of(flat: Any) -> dict[str, Any]:
    """A flat reply of names and values as a dictionary."""
    return {_text(name): value for name, value in _paired(flat or ())}


def number(raw: bytes | str | None) -> int:
    """A number that another program may have written in any format (`1e+15`); 0 for none."""
    try:
        found = float(raw) if raw else 0.0
    except ValueError:
        return 0
    return int(found) if abs(found) < _NUMBER_MAX else 0


def clock_ms(reply: Any) -> int:
    """The server's time, from a reply to TIME."""
    return int(reply[0]) * 1000 + int(reply[1]) // 1000


def event_of(entry_id: bytes, flat: Any) -> JobEvent:
    """One entry of a job's event stream."""
    fields = fields_of(flat)
    return JobEvent(
        event_id=entry_id.decode(),
        type=_text(fields.get("type", b"")),
        ts_ms=number(fields.get("ts")),
        step=_text(fields.get("step", b"")),
        data=fields.get("data", b"{}"),
    )


def events_of(entries: Iterable[Any] | None) -> list[JobEvent]:
    """The entries of a job's event stream."""
    return [event_of(*entry) for entry in entries or ()]


def lost(lease: Lease, reason: bytes) -> LeaseLost:
    """The seam's answer for a lease that has ended."""
    return LeaseLost(lease.job_id, _text(reason))


def _paired(flat: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


# -- the ledger -----------------------------------------------------------------------------------


def matches(record: JobRecord, query: Query) -> bool:
    """Whether the job is in one of the states and of the task that the query names."""
    return (not query.states or record.state in query.states) and (
        not query.task or record.task == query.task
    )


class RedisLedger(ABC):
    """The part of a ledger shared by all Redis contracts.

    `prefix` is that of the queue's own keys. In the hash `<prefix>workers`, each worker has a value
    of items separated by blanks: the time of its last call first, its slots at `_SLOTS_AT`.
    """

    _SLOTS_AT = 1

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix

    @abstractmethod
    async def _apply_action(self, action: str, job_ids: Sequence[str]) -> list[str]:
        """Retry, cancel or remove jobs; one answer per id."""

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send finished jobs back; per id "ok", "missing", or why not."""
        return await self._apply_action("retry", job_ids)

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (it was waiting), "requested" (its worker will stop it), or why not."""
        return await self._apply_action("cancel", job_ids)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Delete jobs that are not running; per id "ok", "missing", or why not."""
        return await self._apply_action("remove", job_ids)

    async def workers(self) -> list[WorkerBeat]:
        """Our workers that called lately, including those that found no job."""
        commands = [("TIME",), ("HGETALL", f"{self._prefix}workers")]
        clock, flat = await read_all(self._redis, commands)
        return self._alive(flat, clock_ms(clock))

    async def probe(self) -> None:
        """Raise `StoreError` if the server accepts no writes."""
        await self._redis.call("SET", f"{self._prefix}probe", "", "PX", 1)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    def _alive(self, flat: Any, now_ms: int) -> list[WorkerBeat]:
        beats = []
        for worker_id, value in fields_of(flat).items():
            items = value.split(b" ")
            slots = number(items[self._SLOTS_AT]) if len(items) > self._SLOTS_AT else 0
            beats.append(WorkerBeat(worker_id, number(items[0]), slots))
        return [beat for beat in beats if abs(now_ms - beat.last_ms) < WORKER_ALIVE_MS]

    async def _page(
        self,
        query: Query,
        prefix: str,
        step_after: Callable[[str], Awaitable[list[tuple[int, str]]]],
        parse: Callable[[str, Any], JobRecord | None],
        is_wanted: Callable[[JobRecord], bool],
    ) -> Page:
        """The next jobs of an index that match, newest first.

        `step_after` returns times and ids after a cursor, fewer than `INDEX_STEP` only at the end.
        `prefix` and an id make the key of a hash, and `parse` makes a record of its raw reply.

        The cursor is `ms:job_id` of the last job that was found. If the scan ends at a job that
        does not match, a cursor with its id could show a job of another requester. So the scan
        then goes on to the end of that millisecond, and the cursor is `ms:` without an id.
        """
        found: list[JobRecord] = []
        after, scanned, read, last_ms = query.after, 0, 0, -1
        while True:
            step = await step_after(after)
            async for ms, job_id, flat in read_hashes(self._redis, prefix, step):
                if (scanned >= _SCAN_MAX or read >= PAGE_BYTES) and ms != last_ms:
                    return Page(found, f"{last_ms}:")
                after, last_ms = f"{ms}:{job_id}", ms
                scanned += 1
                record = parse(job_id, flat) if flat else None
                read += weight(record) if record else 0
                if record and is_wanted(record):
                    found.append(record)
                    if len(found) >= query.limit or read >= PAGE_BYTES:
                        return Page(found, after)
            if len(step) < INDEX_STEP:
                return Page(found)
