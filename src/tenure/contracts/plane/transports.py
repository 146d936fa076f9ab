"""How a plane learns which job is next: Redis Streams, or the rows of the database."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from tenure.contracts.plane.model import queue_of, warn
from tenure.core.encoding import short_hash
from tenure.core.errors import ServerError, StoreError
from tenure.core.lease import Lease
from tenure.core.seam import PAGE_BYTES
from tenure.sql.claim import ttl_ms
from tenure.sql.engine import PLANE, Engine, QueueListener, QueueSettings, Row, why_unreadable
from tenure.sql.upkeep import Upkeeper
from tenure.store.batcher import Batcher
from tenure.store.redis import Redis

# While an old transaction is open, PostgreSQL keeps dead index entries at the head of a queue. So a
# claim that got all it wanted continues where it stopped, and starts at the head every second.
_HEAD = (-(2**31), -1)
_HEAD_EVERY_S = 1.0
_CHECK_DUE_EVERY_S = 0.05
_CLAIMERS_MAX = 100


class TakeResult(NamedTuple):
    """Leases, and in how many milliseconds the next job is due (0: none known)."""

    leases: list[Lease]
    due_in_ms: int = 0


class Transport(Protocol):
    """Says which job of a stream is next."""

    async def take(self, stream: str, limit: int, worker_id: str, token: str) -> TakeResult:
        """Leases on the next jobs of a stream: lease, attempt and state in one transaction.

        Their payloads reach `PAGE_BYTES` with the last one at most.
        """

    async def acknowledge(self, stream: str, message_ids: Sequence[str]) -> None:
        """Forget these messages, whose leases have ended in the database (P-14)."""

    async def note_requeued(self, stream: str) -> None:
        """A job of the stream became claimable."""

    async def upkeep(self) -> None:
        """Send lost messages again."""

    def listener(self, stream: str) -> QueueListener:
        """Wakes when a stream may have jobs."""

    async def close(self) -> None:
        """Close the connections."""


class _Cursor:
    """Where the next claim of a stream begins."""

    __slots__ = ("due_checked_at", "head_at", "position")

    def __init__(self) -> None:
        self.position = _HEAD
        self.head_at = self.due_checked_at = float("-inf")


class _ClaimRequest(NamedTuple):
    """A claim in a batch of claims."""

    worker_id: str
    token: str
    limit: int


class RowTransport:
    """The job's row is its message. Claims that arrive together share one transaction."""

    def __init__(
        self,
        engine: Engine,
        settings: Mapping[str, QueueSettings],
        upkeepers: Mapping[str, Upkeeper],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._upkeepers = upkeepers
        self._cursors = {stream: _Cursor() for stream in settings}
        self._batchers: dict[str, Batcher[_ClaimRequest, TakeResult]] = {
            stream: Batcher(
                partial(self._take, stream),
                items_max=_CLAIMERS_MAX,
                calls_max=calls_max(engine),
                weigh=lambda claimer: claimer.limit,
            )
            for stream in settings
        }

    async def take(self, stream: str, limit: int, worker_id: str, token: str) -> TakeResult:
        (taken,) = await self._batchers[stream]([_ClaimRequest(worker_id, token, limit)])
        return taken

    async def _take(self, stream: str, claimers: list[_ClaimRequest]) -> list[TakeResult]:
        cursor, now = self._cursors[stream], asyncio.get_running_loop().time()
        if now - cursor.head_at > _HEAD_EVERY_S:
            cursor.position = _HEAD
        check_due = now - cursor.due_checked_at > _CHECK_DUE_EVERY_S or cursor.position == _HEAD
        if check_due:
            cursor.due_checked_at = now
        rows = await self._claim_rows(stream, claimers, check_due=check_due)
        if rows[0]["overdue"]:
            await self._upkeepers[stream].due()
            cursor.position = _HEAD
            rows = await self._claim_rows(stream, claimers, check_due=False)
        if rows[0]["job_id"] is None and cursor.position != _HEAD:
            cursor.position = _HEAD  # a requeued job may be before the position
            rows = await self._claim_rows(stream, claimers, check_due=True)
        return self._distribute(stream, rows, claimers)

    async def acknowledge(self, stream: str, message_ids: Sequence[str]) -> None:
        """Nothing to do: the row has changed."""

    async def note_requeued(self, stream: str) -> None:
        self._cursors[stream].position = _HEAD

    async def upkeep(self) -> None:
        """Nothing can get lost: there are no messages."""

    def listener(self, stream: str) -> QueueListener:
        return self._engine.listener(queue_of(stream))

    async def close(self) -> None:
        """The connections belong to the plane."""

    async def _claim_rows(
        self, stream: str, claimers: list[_ClaimRequest], *, check_due: bool
    ) -> Sequence[Row]:
        cursor = self._cursors[stream]
        if cursor.position == _HEAD:
            cursor.head_at = asyncio.get_running_loop().time()
        return await self._engine.run(
            PLANE,
            "plane_claim",
            [(each.worker_id, short_hash(each.token.encode()), each.limit) for each in claimers],
            queue=queue_of(stream),
            lease_ms=self._settings[stream].lease_ms,
            check_due=check_due,
            from_priority=cursor.position[0],
            from_seq=cursor.position[1],
            bytes=PAGE_BYTES,
        )

    def _distribute(
        self, stream: str, rows: Sequence[Row], claimers: list[_ClaimRequest]
    ) -> list[TakeResult]:
        """The leases of each claimer."""
        cursor, first = self._cursors[stream], rows[0]
        due_in_ms = max(1, first["next_due_ms"] - first["now_ms"]) if first["next_due_ms"] else 0
        results = [TakeResult([], due_in_ms) for _ in claimers]
        if first["job_id"] is None:
            cursor.position = _HEAD
            return results
        last, wanted = rows[-1], sum(each.limit for each in claimers)
        cursor.position = (last["priority"], last["seq"]) if len(rows) >= wanted else _HEAD
        for row in rows:
            at = row["n"] - 1
            results[at].leases.append(lease_of(row, stream, claimers[at].token))
        return results


def calls_max(engine: Engine) -> int:
    """How many batches may run at once; SQLite has only one writer."""
    return 2 if engine.dialect == "postgres" else 1


def lease_of(row: Row, stream: str, token: str, message_id: str = "") -> Lease:
    """The lease in a row of a claim or of a recovered claim."""
    return Lease(
        job_id=row["job_id"],
        queue=stream,
        task=row["task"],
        payload=row["payload"].encode(),
        attempt=row["attempt_count"],
        max_attempts=row["max_attempts"],
        fence=row["claim_version"],
        token=token,
        lease_until_ms=row["lease_expires_at"],
        lease_ms=max(1, row["lease_expires_at"] - row["now_ms"]),
        created_ms=row["created_ms"],
        handle=message_id or f"{row['seq']}-{row['claim_version']}",
        gid=row["gid"],
        priority=row["priority"],
        trace=row["trace"],
        ttl_ms=ttl_ms(row),
        extra=why_unreadable(row) or None,
    )


GROUP = "plane"
_AGAIN = "again/"
_SEND_MAX = 500
_SWEEP_MAX = 500
_REDIS_RETRY_S = 1.0
# Race: a submit that is concurrent with the registration of its stream creates no outbox message.
# Later checks send the messages of such jobs: a few checks soon, then one from time to time, for
# transactions that another program keeps open longer.
_RECHECK_S = (0.2, 2.0, 40.0)
_RECHECK_EVERY_S = 300.0


class _Message(NamedTuple):
    """A message that was read; a prefix of `id` says in which of the two Redis streams it is."""

    id: str
    job_id: str
    enqueue_id: int


class MessageTransport:
    """The streams of one plane in one Redis.

    A stream is two Redis streams: one of new jobs, and `:again` of jobs that were claimed before,
    which is read first. The database decides about every message; while Redis does not answer,
    claims use the rows instead.
    """

    def __init__(
        self,
        engine: Engine,
        redis: Redis,
        settings: Mapping[str, QueueSettings],
        upkeepers: Mapping[str, Upkeeper],
        *,
        consumer: str,
        namespace: str = "",
        resend_ms: int = 10_000,
    ) -> None:
        self._engine = engine
        self._redis = redis
        self._settings = settings
        self._upkeepers = upkeepers
        self._rows = RowTransport(engine, settings, upkeepers)
        self._consumer = consumer
        self._namespace = namespace
        self._resend_ms = resend_ms
        # Messages that were read but not claimed: the stream is paused, or the database failed.
        self._undecided: defaultdict[str, list[_Message]] = defaultdict(list)
        self._ready: set[str] = set()
        self._rechecks: dict[str, list[float]] = {}
        self._due_checked_at: dict[str, float] = {}
        self._relaying = {stream: asyncio.Lock() for stream in settings}
        self._retry_redis_at = 0.0

    # --- claims --------------------------------------------------------------------------------

    async def take(self, stream: str, limit: int, worker_id: str, token: str) -> TakeResult:
        await self._promote_due(stream)
        messages = self._undecided[stream][:limit]
        del self._undecided[stream][:limit]
        if len(messages) < limit:
            try:
                messages += await self._read(stream, limit - len(messages))
            except StoreError as error:
                if not messages:
                    self._redis_failed(error)
                    return await self._rows.take(stream, limit, worker_id, token)
        return await self._claim(stream, messages, worker_id, token) if messages else TakeResult([])

    async def _claim(
        self, stream: str, messages: list[_Message], worker_id: str, token: str
    ) -> TakeResult:
        """P-5: the database decides about each message; stale ones are acknowledged.

        Messages of jobs that are too many bytes for this claim wait for the next one.
        """
        try:
            rows = await self._engine.run(
                PLANE,
                "plane_take",
                [(message.job_id, message.enqueue_id) for message in messages],
                queue=queue_of(stream),
                lease_ms=self._settings[stream].lease_ms,
                worker_id=worker_id,
                token_h=short_hash(token.encode()),
                bytes=PAGE_BYTES,
            )
        except BaseException:
            self._undecided[stream] += messages
            raise
        if rows[0]["paused"]:
            self._undecided[stream] += messages
            return TakeResult([])
        current = {row["n"] for row in rows}
        stale = [each.id for number, each in enumerate(messages, 1) if number not in current]
        taken = [row for row in rows if row["job_id"] is not None]
        left = current - {row["n"] for row in taken} - {None}
        self._undecided[stream][:0] = [messages[number - 1] for number in sorted(left)]
        await self.acknowledge(stream, stale)
        in_turn = sorted(taken, key=lambda row: int(row["seq"]))
        return TakeResult(
            [lease_of(row, stream, token, messages[row["n"] - 1].id) for row in in_turn]
        )

    async def _promote_due(self, stream: str) -> None:
        """Promote jobs that are due and send their messages, at most every 50 ms."""
        now = asyncio.get_running_loop().time()
        if now - self._due_checked_at.get(stream, float("-inf")) < _CHECK_DUE_EVERY_S:
            return
        self._due_checked_at[stream] = now
        await self._upkeepers[stream].due()
        await self.relay(stream)

    async def _read(self, stream: str, count: int) -> list[_Message]:
        """New messages; those of jobs that were claimed before come first."""
        if asyncio.get_running_loop().time() < self._retry_redis_at:
            raise StoreError("Redis did not answer a moment ago")
        await self._groups(stream)
        found: list[_Message] = []
        for key, prefix in self._keys(stream):
            if len(found) >= count:
                break
            try:
                reply = await self._redis.call(
                    *("XREADGROUP", "GROUP", GROUP, self._consumer, "COUNT", count - len(found)),
                    *("STREAMS", key, ">"),
                )
            except ServerError as error:
                if "NOGROUP" not in str(error):
                    raise
                self._ready.discard(stream)  # Redis came back without its streams
                await self._groups(stream)
                continue
            found += [_message(entry, prefix) for _, entries in reply or () for entry in entries]
        return found

    async def acknowledge(self, stream: str, message_ids: Sequence[str]) -> None:
        """Acknowledge and delete messages. Upkeep repeats an acknowledgement that was lost."""
        commands: list[tuple[str, ...]] = []
        for key, prefix in self._keys(stream):
            ids = [each.removeprefix(prefix) for each in message_ids if _is_in(each, prefix)]
            if ids:
                commands += [("XACK", key, GROUP, *ids), ("XDEL", key, *ids)]
        if commands:
            with contextlib.suppress(StoreError):
                await self._redis.pipeline(commands)

    # --- sending -------------------------------------------------------------------------------

    async def note_requeued(self, stream: str) -> None:
        await self.relay(stream)
        await self._rows.note_requeued(stream)

    async def relay(self, stream: str) -> None:
        """P-3: send the messages of the outbox table. What could not be sent stays there."""
        if asyncio.get_running_loop().time() < self._retry_redis_at:
            return
        async with self._relaying[stream]:
            try:
                await self._groups(stream)
                await self._recheck(stream)
                while await self._relay_some(stream) == _SEND_MAX:
                    pass
            except StoreError as error:
                self._redis_failed(error)

    async def _relay_some(self, stream: str) -> int:
        redis_ms = await self._redis.server_time_ms()
        rows = await self._engine.run(
            PLANE, "plane_send", queue=queue_of(stream), count=_SEND_MAX, redis_ms=redis_ms
        )
        if not rows:
            return 0
        (again, _), (fresh, _) = self._keys(stream)
        commands = [
            (
                *("XADD", again if row["again"] else fresh, "*"),
                *("job_id", row["job_id"], "enqueue_id", row["enqueue_id"]),
            )
            for row in rows
        ]
        try:
            replies: list[Any] = await self._redis.pipeline(commands)
        except BaseException:
            await self._unsend(rows)
            raise
        failed = [
            row for row, reply in zip(rows, replies, strict=True) if isinstance(reply, Exception)
        ]
        if failed:
            await self._unsend(failed)
            raise StoreError(f"Redis took {len(rows) - len(failed)} of {len(rows)} messages")
        return len(rows)

    async def _unsend(self, rows: Sequence[Any]) -> None:
        batch = [(row["job_id"], row["enqueue_id"]) for row in rows]
        await self._engine.run(PLANE, "plane_unsend", batch)

    # --- lost messages -------------------------------------------------------------------------

    async def upkeep(self) -> None:
        for stream in self._settings:
            await self.relay(stream)
            with contextlib.suppress(StoreError):
                await self._sweep(stream)
                for key, prefix in self._keys(stream):
                    await self._adopt(stream, key, prefix)

    async def _sweep(self, stream: str) -> None:
        """P-4: send messages again that Redis has lost."""
        await self._groups(stream)
        empty, delivered_ms = True, 0
        now_s, _ = await self._redis.call("TIME")
        for key, _ in self._keys(stream):
            for group in await self._redis.call("XINFO", "GROUPS", key):
                info = dict(zip(group[::2], group[1::2], strict=True))
                if info[b"name"] != GROUP.encode():
                    continue
                last = bytes(info[b"last-delivered-id"]).decode()
                # Another program may have set any id, also the largest, which nothing follows.
                with contextlib.suppress(ServerError):
                    newest = await self._redis.call("XREVRANGE", key, "+", f"({last}", "COUNT", 1)
                    empty = empty and not newest
                delivered_ms = max(delivered_ms, int(last.partition("-")[0]))
        delivered_ms = min(delivered_ms, int(now_s) * 1000)
        rows = await self._engine.run(
            PLANE,
            "plane_sweep",
            queue=queue_of(stream),
            resend_ms=self._resend_ms,
            empty=empty,
            delivered_redis_ms=delivered_ms,
            count=_SWEEP_MAX,
        )
        if rows[0]["again"]:
            warn("messages were lost and go out again", stream=stream, **dict(rows[0]))
            await self.relay(stream)

    async def _adopt(self, stream: str, key: str, prefix: str) -> None:
        """Take over messages that a plane read long ago and did not claim; drop stale ones."""
        idle_ms = max(self._settings[stream].lease_ms, self._resend_ms)
        reply = await self._redis.call(
            "XAUTOCLAIM", key, GROUP, self._consumer, idle_ms, "0-0", "COUNT", _SWEEP_MAX
        )
        held = {message.id for message in self._undecided[stream]}
        found = [_message(entry, prefix) for entry in reply[1] if entry and entry[1]]
        messages = [message for message in found if message.id not in held]
        if not messages:
            return
        rows = await self._engine.run(
            PLANE,
            "plane_current",
            [(message.job_id, message.enqueue_id) for message in messages],
            queue=queue_of(stream),
        )
        current = {row["n"]: bool(row["waits"]) for row in rows}
        numbered = list(enumerate(messages, 1))
        self._undecided[stream] += [each for number, each in numbered if current.get(number)]
        await self.acknowledge(
            stream, [each.id for number, each in numbered if number not in current]
        )

    # --- helpers -------------------------------------------------------------------------------

    def listener(self, stream: str) -> QueueListener:
        return _MessageListener(self._redis, [key for key, _ in self._keys(stream)])

    async def close(self) -> None:
        await self._redis.close()

    def _keys(self, stream: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """The two Redis streams with the prefixes of their message ids, in reading order."""
        key = self._namespace + stream
        return (f"{key}:again", _AGAIN), (key, "")

    async def _groups(self, stream: str) -> None:
        if stream in self._ready:
            return
        await self._engine.run(PLANE, "plane_relay", queue=queue_of(stream))
        for key, _ in self._keys(stream):
            try:
                await self._redis.call("XGROUP", "CREATE", key, GROUP, "0", "MKSTREAM")
            except ServerError as error:
                if "BUSYGROUP" not in str(error):
                    raise
        self._ready.add(stream)

        now = asyncio.get_running_loop().time()
        self._rechecks[stream] = [now + wait_s for wait_s in _RECHECK_S]

    async def _recheck(self, stream: str) -> None:
        """Make messages for jobs that were submitted while the stream was being registered."""
        due = self._rechecks.get(stream)
        now = asyncio.get_running_loop().time()
        if due and now >= due[0]:
            await self._engine.run(PLANE, "plane_relay", queue=queue_of(stream))
            due[:] = due[1:] or [now + _RECHECK_EVERY_S]

    def _redis_failed(self, error: StoreError) -> None:
        """Let claims use the rows for a moment, before Redis is tried again."""
        now = asyncio.get_running_loop().time()
        if now >= self._retry_redis_at:
            warn("Redis does not answer; claims go by the database", error=str(error))
        self._retry_redis_at = now + _REDIS_RETRY_S
        self._ready.clear()


class _MessageListener:
    """Wakes when a message arrived after the listener was armed."""

    def __init__(self, redis: Redis, keys: Sequence[str]) -> None:
        self._redis = redis
        self._keys = keys
        self._after: list[str] = []

    async def arm(self) -> bool:
        self._after = []
        with contextlib.suppress(StoreError):
            commands = [("XREVRANGE", key, "+", "-", "COUNT", 1) for key in self._keys]
            replies = await self._redis.pipeline(commands)
            self._after = [
                reply[0][0].decode() if reply and not isinstance(reply, Exception) else "0-0"
                for reply in replies
            ]
        return False

    async def wait(self, wait_ms: int) -> None:
        if not self._after:
            await asyncio.sleep(wait_ms / 1000)
            return
        try:
            where = (*self._keys, *self._after)
            await self._redis.block(
                "XREAD", "COUNT", 1, "BLOCK", wait_ms, "STREAMS", *where, wait_ms=wait_ms
            )
        except StoreError:
            await asyncio.sleep(min(wait_ms, 200) / 1000)

    async def disarm(self, *, more: bool) -> None:
        """Every listener wakes: there is no notice to pass on."""

    async def close(self) -> None:
        """The connection belongs to the transport."""


def _is_in(message_id: str, prefix: str) -> bool:
    """Whether a message id is valid and of the Redis stream with this prefix."""
    if message_id.startswith(_AGAIN) != bool(prefix):
        return False
    ms, _, number = message_id.removeprefix(prefix).partition("-")
    return all(each.isdecimal() and each.isascii() and len(each) < 20 for each in (ms, number))


def _message(entry: Any, prefix: str) -> _Message:
    fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    number = bytes(fields.get(b"enqueue_id", b"")).decode(errors="replace")
    job_id = bytes(fields.get(b"job_id", b"")).decode(errors="replace")
    return _Message(
        prefix + entry[0].decode(),
        job_id.replace("\0", "\ufffd"),  # PostgreSQL takes no NUL, and no job has one in its id
        int(number) if number.isdecimal() and number.isascii() and len(number) < 19 else -1,
    )
