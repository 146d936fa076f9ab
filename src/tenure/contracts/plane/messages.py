"""Redis Streams as the transport: each job in the line has a message, and a claim follows one.

The database stays the truth. A job that comes into the line leaves a row in the enqueue outbox, in
the same transaction; `relay` makes messages of these rows. A message that is read is checked
against its job: whatever is stale or double is acknowledged and dropped. A message is acknowledged
when its attempt has been decided. `upkeep` sends again what Redis lost, and looks after messages
whose reader died. While Redis is away, claims go by the rows themselves.

Jobs that were claimed before travel in a second stream, `<name>:again`, that is read first: who has
waited once does not wait behind those who came later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tenure.contracts.plane.rows import RowTransport, lease_of
from tenure.contracts.plane.transport import Taken
from tenure.contracts.plane.warning import warn
from tenure.contracts.plane.words import queue_of
from tenure.core.errors import ServerError, StoreError
from tenure.core.job import short_hash
from tenure.ledger.engine import PLANE, Bell, Engine
from tenure.ledger.settings import BoxSettings
from tenure.ledger.upkeeping import Upkeeping
from tenure.store.redis import Redis

GROUP = "plane"
_AGAIN = "again/"
_SEND_MAX = 500
_SWEEP_MAX = 500
_LOOK_EVERY_S = 0.05
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
        boxes: Mapping[str, BoxSettings],
        chores: Mapping[str, Upkeeping],
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

    def bell(self, stream: str) -> Bell:
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
    """Rings when a message came after the bell was armed."""

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
