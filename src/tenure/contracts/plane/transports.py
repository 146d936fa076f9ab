"""How a plane learns which job is next: Redis Streams, or the rows of the database."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from tenure.contracts.plane.model import queue_of, warn
from tenure.core.errors import ServerError, StoreError
from tenure.core.job import short_hash
from tenure.core.lease import Lease
from tenure.sql.engine import PLANE, Engine, QueueListener, QueueSettings, Row, why_unreadable
from tenure.sql.upkeep import Upkeeper
from tenure.store.batcher import Batcher
from tenure.store.redis import Redis

# PostgreSQL leaves dead entries at the head of a line while somebody keeps an old transaction open:
# a stream that was full begins where the last claim stopped, and at the head again every second.
_HEAD = (-(2**31), -1)
_HEAD_AGAIN_S = 1.0
_LOOK_EVERY_S = 0.05
_ASKERS_MAX = 100


class Taken(NamedTuple):
    """What a look brought: leases, and in how many milliseconds a job is due (0: none known)."""

    leases: list[Lease]
    due_in_ms: int = 0


class Transport(Protocol):
    """Carries the streams' messages."""

    async def take(self, stream: str, limit: int, worker_id: str, token: str) -> Taken:
        """Leases on the next jobs of a stream: lease, attempt and state in one transaction."""

    async def done(self, stream: str, message_ids: Sequence[str]) -> None:
        """These messages have had their effect (P-14): the transport may forget them."""

    async def sent_back(self, stream: str) -> None:
        """A job of the stream waits again."""

    async def upkeep(self) -> None:
        """Bring back what got lost on the way."""

    def listener(self, stream: str) -> QueueListener:
        """Rings when there may be something in a stream."""

    async def close(self) -> None:
        """Let go of connections."""


class _Place:
    """Where the next look at a stream begins."""

    __slots__ = ("begins", "head_s", "looked_s")

    def __init__(self) -> None:
        self.begins = _HEAD
        self.head_s = self.looked_s = float("-inf")


class Asker(NamedTuple):
    """Somebody who asks for leases."""

    worker_id: str
    token: str
    limit: int


class RowTransport:
    """Claims by the rows themselves; those that come at the same time share one transaction."""

    def __init__(
        self, engine: Engine, boxes: Mapping[str, QueueSettings], chores: Mapping[str, Upkeeper]
    ) -> None:
        self._engine = engine
        self._boxes = boxes
        self._chores = chores
        self._places = {stream: _Place() for stream in boxes}
        self._gathered: dict[str, Batcher[Asker, Taken]] = {
            stream: Batcher(
                partial(self._take, stream),
                items_max=_ASKERS_MAX,
                calls_max=calls_max(engine),
                weigh=lambda asker: asker.limit,
            )
            for stream in boxes
        }

    async def take(self, stream: str, limit: int, worker_id: str, token: str) -> Taken:
        (taken,) = await self._gathered[stream]([Asker(worker_id, token, limit)])
        return taken

    async def _take(self, stream: str, askers: list[Asker]) -> list[Taken]:
        place, now = self._places[stream], asyncio.get_running_loop().time()
        if now - place.head_s > _HEAD_AGAIN_S:
            place.begins = _HEAD
        look = now - place.looked_s > _LOOK_EVERY_S or place.begins == _HEAD
        if look:
            place.looked_s = now
        rows = await self._ask(stream, askers, look=look)
        if rows[0]["overdue"]:
            await self._chores[stream].due()
            place.begins = _HEAD
            rows = await self._ask(stream, askers, look=False)
        if rows[0]["job_id"] is None and place.begins != _HEAD:
            place.begins = _HEAD  # what was sent back stands before where the last claim stopped
            rows = await self._ask(stream, askers, look=True)
        return self._dealt(stream, rows, askers)

    async def done(self, stream: str, message_ids: Sequence[str]) -> None:
        """The row tells it already."""

    async def sent_back(self, stream: str) -> None:
        self._places[stream].begins = _HEAD

    async def upkeep(self) -> None:
        """Nothing can get lost: there is one place."""

    def listener(self, stream: str) -> QueueListener:
        return self._engine.listener(queue_of(stream))

    async def close(self) -> None:
        """The connections belong to the plane."""

    async def _ask(self, stream: str, askers: list[Asker], *, look: bool) -> Sequence[Row]:
        place = self._places[stream]
        if place.begins == _HEAD:
            place.head_s = asyncio.get_running_loop().time()
        return await self._engine.run(
            PLANE,
            "plane_claim",
            [(each.worker_id, short_hash(each.token.encode()), each.limit) for each in askers],
            queue=queue_of(stream),
            lease_ms=self._boxes[stream].lease_ms,
            look=look,
            from_priority=place.begins[0],
            from_seq=place.begins[1],
        )

    def _dealt(self, stream: str, rows: Sequence[Row], askers: list[Asker]) -> list[Taken]:
        """To each asker what it was given."""
        place, first = self._places[stream], rows[0]
        due_in_ms = max(1, first["next_due_ms"] - first["now_ms"]) if first["next_due_ms"] else 0
        dealt = [Taken([], due_in_ms) for _ in askers]
        if first["job_id"] is None:
            place.begins = _HEAD
            return dealt
        last, wanted = rows[-1], sum(each.limit for each in askers)
        place.begins = (last["priority"], last["seq"]) if len(rows) >= wanted else _HEAD
        for row in rows:
            at = row["n"] - 1
            dealt[at].leases.append(lease_of(row, stream, askers[at].token))
        return dealt


def calls_max(engine: Engine) -> int:
    """How many calls of a kind shall be under way: SQLite has one writer that they would share."""
    return 2 if engine.dialect == "postgres" else 1


def lease_of(row: Row, stream: str, token: str, message_id: str = "") -> Lease:
    """A lease, from the row of a claim or of one whose answer was lost."""
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
        extra=why_unreadable(row) or None,
    )


GROUP = "plane"
_AGAIN = "again/"
_SEND_MAX = 500
_SWEEP_MAX = 500
_AWAY_S = 1.0
# A submit under way while the stream is registered sees no registration, and the registration does
# not see its job, which then has no message. Looking again finds it: soon, and then rarely, for a
# transaction that another program kept open for longer.
_RECHECK_S = (0.2, 2.0, 40.0)
_RECHECK_EVERY_S = 300.0


class Message(NamedTuple):
    """A message as it was read; `id` says in which of the two streams it is."""

    id: str
    job_id: str
    enqueue_id: int


class MessageTransport:
    """The streams of one plane in one Redis."""

    def __init__(
        self,
        engine: Engine,
        redis: Redis,
        boxes: Mapping[str, QueueSettings],
        chores: Mapping[str, Upkeeper],
        *,
        consumer: str,
        namespace: str = "",
        resend_ms: int = 10_000,
    ) -> None:
        self._engine = engine
        self._redis = redis
        self._boxes = boxes
        self._chores = chores
        self._rows = RowTransport(engine, boxes, chores)
        self._consumer = consumer
        self._namespace = namespace
        self._resend_ms = resend_ms
        # Read but not decided about: the stream is paused, or the database did not answer.
        self._kept: defaultdict[str, list[Message]] = defaultdict(list)
        self._ready: set[str] = set()
        self._rechecks: dict[str, list[float]] = {}
        self._looked_s: dict[str, float] = {}
        self._relaying = {stream: asyncio.Lock() for stream in boxes}
        self._away_until_s = 0.0

    # --- claims --------------------------------------------------------------------------------

    async def take(self, stream: str, limit: int, worker_id: str, token: str) -> Taken:
        await self._look(stream)
        messages = self._kept[stream][:limit]
        del self._kept[stream][:limit]
        if len(messages) < limit:
            try:
                messages += await self._read(stream, limit - len(messages))
            except StoreError as error:
                if not messages:
                    self._is_away(error)
                    return await self._rows.take(stream, limit, worker_id, token)
        return await self._claim(stream, messages, worker_id, token) if messages else Taken([])

    async def _claim(
        self, stream: str, messages: list[Message], worker_id: str, token: str
    ) -> Taken:
        """P-5: the database decides about each message; what it does not know is dropped."""
        try:
            rows = await self._engine.run(
                PLANE,
                "plane_take",
                [(message.job_id, message.enqueue_id) for message in messages],
                queue=queue_of(stream),
                lease_ms=self._boxes[stream].lease_ms,
                worker_id=worker_id,
                token_h=short_hash(token.encode()),
            )
        except BaseException:
            self._kept[stream] += messages
            raise
        if rows[0]["paused"]:
            self._kept[stream] += messages
            return Taken([])
        taken = {row["n"]: row for row in rows if row["job_id"] is not None}
        stale = [each.id for number, each in enumerate(messages, 1) if number not in taken]
        await self.done(stream, stale)
        in_turn = sorted(taken.items(), key=lambda each: int(each[1]["seq"]))
        return Taken([lease_of(row, stream, token, messages[at - 1].id) for at, row in in_turn])

    async def _look(self, stream: str) -> None:
        """Bring what is due into the line and on its way, now and then."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_s.get(stream, float("-inf")) < _LOOK_EVERY_S:
            return
        self._looked_s[stream] = now
        await self._chores[stream].due()
        await self.relay(stream)

    async def _read(self, stream: str, count: int) -> list[Message]:
        """New messages, those of jobs that were claimed before first."""
        if asyncio.get_running_loop().time() < self._away_until_s:
            raise StoreError("Redis was away a moment ago")
        await self._groups(stream)
        found: list[Message] = []
        for key, mark in self._keys(stream):
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
            found += [_message(entry, mark) for _, entries in reply or () for entry in entries]
        return found

    async def done(self, stream: str, message_ids: Sequence[str]) -> None:
        """Acknowledge and forget. An acknowledgement that gets lost is made up for by `sweep`."""
        commands: list[tuple[str, ...]] = []
        for key, mark in self._keys(stream):
            ids = [each.removeprefix(mark) for each in message_ids if _is_in(each, mark)]
            if ids:
                commands += [("XACK", key, GROUP, *ids), ("XDEL", key, *ids)]
        if commands:
            with contextlib.suppress(StoreError):
                await self._redis.pipeline(commands)

    # --- the way into Redis --------------------------------------------------------------------

    async def sent_back(self, stream: str) -> None:
        await self.relay(stream)
        await self._rows.sent_back(stream)

    async def relay(self, stream: str) -> None:
        """P-3: send the messages of the outbox. What could not be sent stays there."""
        if asyncio.get_running_loop().time() < self._away_until_s:
            return
        async with self._relaying[stream]:
            try:
                await self._groups(stream)
                await self._recheck(stream)
                while await self._relay_some(stream) == _SEND_MAX:
                    pass
            except StoreError as error:
                self._is_away(error)

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

    # --- what got lost -------------------------------------------------------------------------

    async def upkeep(self) -> None:
        for stream in self._boxes:
            await self.relay(stream)
            with contextlib.suppress(StoreError):
                await self._sweep(stream)
                for key, mark in self._keys(stream):
                    await self._adopt(stream, key, mark)

    async def _sweep(self, stream: str) -> None:
        """P-4: messages that Redis does not hold any more go out again."""
        await self._groups(stream)
        empty, delivered_ms = True, 0
        for key, _ in self._keys(stream):
            for group in await self._redis.call("XINFO", "GROUPS", key):
                info = dict(zip(group[::2], group[1::2], strict=True))
                last = bytes(info[b"last-delivered-id"]).decode()
                newest = await self._redis.call("XREVRANGE", key, "+", f"({last}", "COUNT", 1)
                empty = empty and not newest
                delivered_ms = max(delivered_ms, int(last.partition("-")[0]))
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

    async def _adopt(self, stream: str, key: str, mark: str) -> None:
        """Messages that a plane read long ago: drop what is over, take on what nobody claimed."""
        idle_ms = max(self._boxes[stream].lease_ms, self._resend_ms)
        reply = await self._redis.call(
            "XAUTOCLAIM", key, GROUP, self._consumer, idle_ms, "0-0", "COUNT", _SWEEP_MAX
        )
        held = {message.id for message in self._kept[stream]}
        found = [_message(entry, mark) for entry in reply[1] if entry and entry[1]]
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
        self._kept[stream] += [each for number, each in numbered if current.get(number)]
        await self.done(stream, [each.id for number, each in numbered if number not in current])

    # --- parts ---------------------------------------------------------------------------------

    def listener(self, stream: str) -> QueueListener:
        return MessageBell(self._redis, [key for key, _ in self._keys(stream)])

    async def close(self) -> None:
        await self._redis.close()

    def _keys(self, stream: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """The two streams in Redis with the marks of their message ids, in reading order."""
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

    def _is_away(self, error: StoreError) -> None:
        """Ask again in a moment, and let claims go by the rows until then."""
        now = asyncio.get_running_loop().time()
        if now >= self._away_until_s:
            warn("Redis does not answer; claims go by the database", error=str(error))
        self._away_until_s = now + _AWAY_S
        self._ready.clear()


class MessageBell:
    """Rings when a message came after the listener was armed."""

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

    async def rest(self, *, more: bool) -> None:
        """Everybody hears a message: there is none to pass on."""

    async def close(self) -> None:
        """The connection belongs to the transport."""


def _is_in(message_id: str, mark: str) -> bool:
    """Whether a message is in the stream with this mark, and names an entry at all."""
    if message_id.startswith(_AGAIN) != bool(mark):
        return False
    ms, _, number = message_id.removeprefix(mark).partition("-")
    return all(each.isdecimal() and each.isascii() and len(each) < 20 for each in (ms, number))


def _message(entry: Any, mark: str) -> Message:
    fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    number = bytes(fields.get(b"enqueue_id", b"")).decode(errors="replace")
    job_id = bytes(fields.get(b"job_id", b"")).decode(errors="replace")
    return Message(
        mark + entry[0].decode(),
        job_id.replace("\0", "\ufffd"),  # PostgreSQL takes no NUL, and no job has one in its id
        int(number) if number.isdecimal() and number.isascii() and len(number) < 19 else -1,
    )
