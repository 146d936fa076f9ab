"""What the contracts on Redis share: opening, batches, refusals, verdicts, quarantine, reading."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tenure.core.errors import LeaseLost, ServerError, UsageError
from tenure.core.job import JobEvent, NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure
from tenure.core.registry import QueueUrl
from tenure.core.seam import READ_STEP, Quarantined, Query
from tenure.store.redis import Arg, Redis
from tenure.store.redis_connection import is_wrong_type
from tenure.store.resend import part

BATCH_MAX = 500
"""How many jobs one script call takes: a longer call would block the server's other clients."""
WORKER_ALIVE_MS = 15_000
INDEX_STEP = 200

_ERROR_CODE_MAX = 80
_NUMBER_MAX = 10**15
_QUARANTINED_MAX = 1_000  # for a queue whose records nobody takes: the latest are kept
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
    """A worker id that scripts may put between blanks or inside JSON; made up if there is none."""
    return _WORKER_ID_UNSAFE.sub("-", worker_id) or f"anon-{secrets.token_hex(6)}"


# -- calls ----------------------------------------------------------------------------------------


async def in_batches(
    items: Sequence[T], send: Callable[[Sequence[T]], Awaitable[Iterable[R]]], size: int = BATCH_MAX
) -> list[R]:
    """The answers to all items, in order; `send` answers one batch."""
    answers: list[R] = []
    for start in range(0, len(items), size):
        answers += await part(start, send(items[start : start + size]))
    return answers


async def submit_valid(
    jobs: Sequence[NewJob],
    encode: Callable[[NewJob], T],
    send: Callable[[Sequence[T]], Awaitable[Iterable[Submitted]]],
) -> list[Submitted]:
    """Send the jobs that `encode` accepts; the answers of all, in order."""
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
    """Refuse event types that followers take for the job's state."""
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
    """The code as the journal takes it: one short word without separators."""
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
        """What was added since the last call."""
        taken, self._records = self._records, []
        return taken


# -- reading --------------------------------------------------------------------------------------


async def read_all(redis: Redis, commands: Sequence[Sequence[Arg]]) -> list[Any]:
    """Replies of a pipeline; None for a key of a wrong type, which a script will set aside."""
    return [readable(reply) for reply in await redis.pipeline(commands)]


def readable(reply: Any) -> Any:
    """One reply of a pipeline; None for a key of a wrong type."""
    if isinstance(reply, ServerError):
        if not is_wrong_type(reply):
            raise reply
        return None
    return reply


async def read_hashes(
    redis: Redis, prefix: str, ids: Sequence[tuple[int, str]]
) -> AsyncIterator[tuple[int, str, Any]]:
    """Time, id and raw reply of each job's hash, in steps that bound what one reply holds."""
    for start in range(0, len(ids), READ_STEP):
        step = ids[start : start + READ_STEP]
        flats = await redis.pipeline([("HGETALL", prefix + job_id) for _, job_id in step])
        for (ms, job_id), flat in zip(step, flats, strict=True):
            yield ms, job_id, flat


async def index_after(redis: Redis, index: str, after: str) -> list[tuple[int, str]]:
    """The next members of a sorted set, highest score first; `after` is the cursor `score:member`.

    Empty only at the end. Many members may share a score, so the cursor names the member too.
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
    # The cursor's own member is gone, or it is made up and must not tell where another's job is:
    # skip by comparing.
    start: int = higher or 0
    while ranks := await _ranks(redis, index, start):
        start += len(ranks)
        left = [each for each in ranks if each < cursor]
        if left:
            # A step that begins among equal scores is filled up from where it ends.
            return left + (await _ranks(redis, index, start) if len(left) < INDEX_STEP else [])
    return []


async def _ranks(redis: Redis, index: str, start: int) -> list[tuple[int, str]]:
    command = ("ZREVRANGE", index, start, start + INDEX_STEP - 1, "WITHSCORES")
    flat = (await read_all(redis, [command]))[0] or ()
    return [(number(score), _text(member)) for member, score in _paired(flat)]


def check_query(
    query: Query, states: Sequence[str], cursor: re.Pattern[str], contract: str
) -> None:
    """Refuse states that the contract does not have, and a cursor that no page can have given."""
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
    """A number that another program may have written carelessly (`1e+15`); 0 for none."""
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


def lost(lease: Lease, reason: bytes) -> LeaseLost:
    """The seam's answer for a lease that is over."""
    return LeaseLost(lease.job_id, _text(reason))


def _paired(flat: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
