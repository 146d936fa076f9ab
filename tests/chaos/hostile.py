"""Hostile writers: clients of the store that put garbage where a queue keeps its records.

A round is one act of a writer that has full access to the store and no good intent: a record of a
wrong type, a field that is no number, a member that is no id, a side key that is replaced. The only
thing it leaves alone is what carries the good jobs themselves (their records, their place in a
lane, the switch that pauses a queue): to delete those is to delete jobs, and no reader could tell.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeAlias

import asyncpg

from tenure.contracts.bullmq import options as bullmq
from tenure.contracts.streams import options as streams
from tenure.core.errors import TenureError
from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.store.redis import Redis
from tests.chaos.plane_subject import PlaneSubject
from tests.chaos.subject import Subject

BAD = "bad-"  # every id of a hostile record begins so
VALUES: tuple[bytes, ...] = (
    b"", b"0", b"-1", b"nan", b"inf", b"-inf", b"Infinity", b"1e999", b"1e400", b"0x10", b" 12 ",
    b"12abc", b"9" * 40, b"-" + b"9" * 25, b"1.5", b"true", b"null", b"[[", b"{", b'{"a":', b"[]",
    b'{"attempts":"x","backoff":[],"delay":{}}', b'"\\ud800"', b"\x00\xff\xfe", b"a\nb\tc\r\n",
    "\u2028\U0001f4a3".encode(), b"[" * 5_000, b"x" * 300_000, b"%s%n", b"- - - - - - -",
    b"1 2 3 4 5 6 7", b"wait", b"active", b"running", b"done", b"{bad}:job:x",
)  # fmt: skip


class Writer(Protocol):
    """One hostile client of one contract's store.

    `leaves_rows` is true where a hostile record may stay where it is: its writer gave it a due time
    in a thousand years, or a state in which it rests. `can_spoil` is true where a record can become
    one that no claim can read. `writes` counts what the store took.
    """

    leaves_rows: bool
    can_spoil: bool
    writes: int

    async def round(self) -> None:
        """One act."""

    async def met(self) -> set[str]:
        """Ids of unreadable records that a claim must have met and set aside."""

    async def set_aside(self) -> dict[str, str]:
        """The reasons of the records that are in quarantine or failed, by their ids."""

    async def close(self) -> None:
        """Let go of connections."""


@dataclass(frozen=True)
class Lane:
    """A key that holds ids, and how an id enters it: a command with `{id}` and `{junk}`."""

    key: str
    enter: Sequence[str]


@dataclass(frozen=True)
class Layout:
    """Where a contract on Redis keeps its records."""

    record: str  # the key of a job, with {id}
    fields: Sequence[str]
    beside: Sequence[str]  # further keys of a job, with {id}
    lanes: Sequence[Lane]
    claimed_from: Sequence[str]  # lanes from which every entry is claimed sooner or later
    sides: Sequence[str]  # structural keys that hold no good job
    quarantine: str  # the stream that tells what was set aside


def _streams() -> Layout:
    stream, journal, delayed, wake, upkeep, stats, index, _paused, workers = streams.keys("")
    entry = ("XADD", stream, "*", "job_id", "{id}", "task", "chat", "payload", "{junk}")
    return Layout(
        record="job:{id}",
        fields=(
            "job_id", "task", "payload", "status", "created_ts", "updated_ts", "ttl_s", "result",
            "error", "lease", "entry",
        ),
        beside=("job:{id}:events",),
        lanes=(
            Lane(stream, entry),
            Lane(stream, ("XADD", stream, "*", "job_id", "{junk}")),
            Lane(stream, ("XADD", stream, "*", "{junk}", "{junk}")),
            Lane(delayed, ("ZADD", delayed, "1", "{id}")),
            Lane(delayed, ("ZADD", delayed, "-inf", "{junk}")),
        ),
        claimed_from=(stream,),
        sides=(journal, wake, upkeep, stats, index, workers),
        quarantine="jobs:quarantine",
    )  # fmt: skip


def _bullmq() -> Layout:
    prefix = bullmq.Options().key_prefix
    (
        wait, active, prioritized, delayed, _paused, meta, events, marker, stalled, limiter, pc,
        completed, failed, children, counter, journal,
    ) = bullmq.keys(prefix)  # fmt: skip
    return Layout(
        record=prefix + "{id}",
        fields=(
            "name", "data", "opts", "timestamp", "delay", "priority", "atm", "ats", "stc",
            "processedOn", "finishedOn", "returnvalue", "failedReason", "stacktrace", "parent",
            "parentKey", "rjk", "deid", "nrjid", "pb",
        ),
        beside=(
            prefix + "{id}:lock", prefix + "{id}:logs", prefix + "{id}:dependencies",
            prefix + "{id}:processed", prefix + "{id}:failed", prefix + "{id}:unsuccessful",
        ),
        lanes=(
            Lane(wait, ("LPUSH", wait, "{id}")),
            Lane(wait, ("RPUSH", wait, "{junk}")),
            Lane(prioritized, ("ZADD", prioritized, "1", "{id}")),
            Lane(prioritized, ("ZADD", prioritized, "-inf", "{junk}")),
            Lane(delayed, ("ZADD", delayed, "1", "{id}")),
            Lane(delayed, ("ZADD", delayed, "-inf", "{junk}")),
            Lane(active, ("LPUSH", active, "{id}")),
            Lane(active, ("LPUSH", active, "{junk}")),
            Lane(stalled, ("SADD", stalled, "{id}", "{junk}")),
            Lane(children, ("ZADD", children, "1", "{id}")),
        ),
        claimed_from=(wait, prioritized),
        sides=(meta, events, marker, stalled, limiter, pc, completed, failed, counter, journal),
        quarantine=prefix + "tenure:quarantine",
    )  # fmt: skip


def _omniq() -> Layout:
    base = "{chaos}"
    wait, active, delayed = f"{base}:wait", f"{base}:active", f"{base}:delayed"
    ready = f"{base}:groups:ready"
    indexes = [f"{base}:idx:{state}" for state in ("wait", "active", "delayed", "completed")]
    return Layout(
        record=base + ":job:{id}",
        fields=(
            "id", "payload", "gid", "state", "attempt", "max_attempts", "timeout_ms", "backoff_ms",
            "created_ms", "updated_ms", "due_ms", "lock_until_ms", "lease_token", "last_error",
            "tn", "task", "cancel",
        ),
        beside=(base + ":g:{id}:wait", base + ":childs:{id}"),
        lanes=(
            Lane(wait, ("RPUSH", wait, "{id}")),
            Lane(wait, ("LPUSH", wait, "{junk}")),
            Lane(active, ("ZADD", active, "1", "{id}")),
            Lane(active, ("ZADD", active, "-inf", "{junk}")),
            Lane(delayed, ("ZADD", delayed, "1", "{id}")),
            Lane(delayed, ("ZADD", delayed, "-inf", "{junk}")),
            Lane(ready, ("ZADD", ready, "0", "{id}")),
            Lane(ready, ("ZADD", ready, "0", "{junk}")),
        ),
        claimed_from=(wait,),
        sides=(
            f"{base}:stats", f"{base}:journal", f"{base}:completed", f"{base}:failed", *indexes,
            f"{base}:wake", f"{base}:upkeep", f"{base}:workers",
        ),
        quarantine=base + ":quarantine",
    )  # fmt: skip


class RedisWriter:
    """A hostile client of a Redis."""

    leaves_rows = False
    can_spoil = True

    def __init__(self, layout: Layout, store_url: str, queue_url: str, rng: Random) -> None:
        self._layout = layout
        self._redis = Redis(store_url, name="hostile")
        self._queue = open_queue(queue_url, worker_id="hostile")
        self._rng = rng
        self._n = self.writes = 0
        self._unreadable: set[str] = set()
        self._aside: dict[str, str] = {}
        self._noted = "-"

    async def round(self) -> None:
        act = self._rng.choice(
            (self._plant, self._plant, self._corrupt, self._corrupt, self._push, self._usurp)
        )
        await act()

    async def _plant(self) -> None:
        """A record of a wrong type or without sense, and its id in a lane."""
        bad, layout = self._id(), self._layout
        lane = self._rng.choice(layout.lanes)
        unreadable = self._rng.random() < 0.5
        if unreadable:
            await self._write(layout.record.replace("{id}", bad), hashes=False)
        else:
            await self._fields(bad, layout.fields)
        if self._rng.random() < 0.3:
            await self._write(self._rng.choice(layout.beside).replace("{id}", bad))
        entered = await self._enter(lane, bad)
        if unreadable and entered and lane.key in layout.claimed_from and "{id}" in lane.enter:
            self._unreadable.add(bad)

    async def _corrupt(self) -> None:
        """A good record at first, then some of its fields are garbage, whatever state it is in."""
        bad = self._id()
        with suppress(TenureError):
            delay_ms = self._rng.choice((0, 0, 50, 200))
            job = NewJob(task="chat", payload=b'{"ms": 20}', job_id=bad, delay_ms=delay_ms)
            await self._queue.submit([job])
        await asyncio.sleep(self._rng.choice((0, 0, 0.005, 0.02)))  # it may be claimed by then
        chance = self._rng.random()
        if chance < 0.7:
            await self._fields(bad, self._rng.sample(self._layout.fields, 2))
        elif chance < 0.85:
            await self._write(self._layout.record.replace("{id}", bad), hashes=False)
        else:
            await self._write(self._rng.choice(self._layout.beside).replace("{id}", bad))

    async def _push(self) -> None:
        """Members without a record."""
        await self._enter(self._rng.choice(self._layout.lanes), self._id())

    async def _usurp(self) -> None:
        """A side key becomes something else; a lane only while it does not exist."""
        lanes = [lane.key for lane in self._layout.lanes]
        key = self._rng.choice((*self._layout.sides, *lanes))
        if key in self._layout.sides:
            await self._write(key)
        else:
            await self._call("SET", key, self._junk(), "NX")

    async def _fields(self, bad: str, names: Sequence[str]) -> None:
        pairs = [each for name in names for each in (name, self._junk())]
        await self._call("HSET", self._layout.record.replace("{id}", bad), *pairs)

    async def _write(self, key: str, *, hashes: bool = True) -> None:
        """Make the key a random type with random content."""
        junk, rng = self._junk, self._rng
        kinds: list[Sequence[Any]] = [
            ("SET", key, junk()),
            ("RPUSH", key, junk(), junk()),
            ("SADD", key, junk(), junk()),
            ("ZADD", key, rng.choice(("-inf", "inf", "0", "1e300")), junk()),
            ("XADD", key, "*", junk(), junk()),
        ]
        if hashes:
            kinds.append(("HSET", key, junk(), junk(), junk(), junk()))
        await self._call("DEL", key)
        await self._call(*rng.choice(kinds))

    async def _enter(self, lane: Lane, bad: str) -> bool:
        values = {"{id}": bad.encode(), "{junk}": self._junk()}
        return await self._call(*(values.get(part, part.encode()) for part in lane.enter))

    async def _call(self, *command: Any) -> bool:
        """Whether the server took it."""
        try:
            await self._redis.call(*command)
        except TenureError:
            return False
        self.writes += command[0] != "DEL"
        return True

    def _id(self) -> str:
        self._n += 1
        return f"{BAD}{self._n:08}-0000-4000-8000-{self._rng.getrandbits(48):012x}"

    def _junk(self) -> bytes:
        if self._rng.random() < 0.2:
            return self._rng.randbytes(self._rng.randint(0, 40))
        return self._rng.choice(VALUES)

    async def met(self) -> set[str]:
        return self._unreadable

    async def set_aside(self) -> dict[str, str]:
        new = await self._redis.call("XRANGE", self._layout.quarantine, self._noted, "+")
        for place, parts in new:
            entry = dict(zip(parts[::2], parts[1::2], strict=True))
            bad = entry.get(b"job_id") or entry.get(b"id", b"")
            self._aside[bad.decode(errors="replace")] = entry[b"reason"].decode(errors="replace")
            self._noted = f"({place.decode()}"
        return self._aside

    async def close(self) -> None:
        await self._queue.close()
        await self._redis.close()


# Runs a statement; the rows that it returned, none where the database refused it.
Run: TypeAlias = Callable[[str, Sequence[Any]], Awaitable[list[Any]]]


class SqlWriter:
    """A hostile client of a database: it writes over the rows of its own jobs, and adds rows."""

    COLUMNS = (
        "task", "priority", "attempt_count", "max_attempts", "lost_count", "event_count", "ver",
        "claim_version", "due_ms", "claimed_ms", "heartbeat_at", "lease_expires_at", "created_ms",
        "updated_ms", "expires_ms", "worker_id", "gid", "requester_id", "request_hash", "trace",
        "status_webhook_url", "refresh_url", "payload", "payload_h", "result", "error", "progress",
        "status", "passed", "ready", "storage_creds_encrypted", "storage_creds_dek_wrapped",
        "storage_creds_kek_id", "credential_version",
    )  # fmt: skip
    NUMBERS = (-1, 0, 1, 2**31 - 1, 2**63 - 1, -(2**63))
    leaves_rows = True

    def __init__(
        self,
        table: str,
        run: Run,
        queue_url: str,
        rng: Random,
        *,
        unreadable: str = "",
        transport: Redis | None = None,
    ) -> None:
        self._unreadable = unreadable  # a payload in SQL that no claim can read
        self.can_spoil = bool(unreadable)
        self._met: set[str] = set()
        self._transport = transport
        self._table = table
        self._run = run
        self._queue = open_queue(queue_url, worker_id="hostile")
        self._rng = rng
        self._n = self.writes = 0

    async def round(self) -> None:
        self._n += 1
        rng = self._rng
        bad = f"{BAD}{self._n:08}-0000-4000-8000-{rng.getrandbits(48):012x}"
        spoils = self.can_spoil and rng.random() < 0.2
        delay_ms = 2_000 if spoils else rng.choice((0, 0, 100))
        with suppress(TenureError):
            job = NewJob(task="chat", payload=b'{"ms": 20}', job_id=bad, delay_ms=delay_ms)
            await self._queue.submit([job])
        if spoils:  # before any claim
            if await self._update("payload", self._unreadable, bad, "AND attempt_count = 0"):
                self._met.add(bad)
            return
        await asyncio.sleep(rng.choice((0, 0, 0.01, 0.03)))
        columns = rng.sample(self.COLUMNS, rng.choice((1, 1, 2, 3)))
        for column in columns:
            await self._update(column, "$1", bad, "", self._value())
        if self._transport is not None:
            await self._message(self._transport, bad)

    async def _update(self, column: str, to: str, bad: str, also: str, *values: Any) -> bool:
        """Whether the database took it."""
        where = f"WHERE job_id = '{bad}' {also} RETURNING 1"
        changed = await self._run(f"UPDATE {self._table} SET {column} = {to} {where}", values)
        self.writes += len(changed)
        return bool(changed)

    async def _message(self, redis: Redis, bad: str) -> None:
        """A message that names no job, or is not in the form of the plane."""
        stream = self._rng.choice(("jobs", "jobs:again"))
        junk = [self._value() for _ in range(2)]
        words = [value if isinstance(value, (str, bytes)) else str(value) for value in junk]
        fields = self._rng.choice((["job_id", bad], ["job_id", words[0]], words, ["", ""]))
        with suppress(TenureError):
            await redis.call("XADD", stream, "*", *fields)

    def _value(self) -> Any:
        rng = self._rng
        chance = rng.random()
        if chance < 0.35:
            return rng.choice(self.NUMBERS)
        if chance < 0.45:
            return None
        junk = rng.choice(VALUES) if chance < 0.9 else rng.randbytes(20)
        return junk if chance > 0.8 else junk.decode(errors="replace")

    async def met(self) -> set[str]:
        return self._met

    async def set_aside(self) -> dict[str, str]:
        unreadable = "error LIKE '%\"unreadable\"%'"
        rows = await self._run(f"SELECT job_id, error FROM {self._table} WHERE {unreadable}", ())
        return {str(bad): str(error) for bad, error in rows}

    async def close(self) -> None:
        await self._queue.close()
        if self._transport is not None:
            await self._transport.close()


def _sqlite_run(file: Path) -> Run:
    """The checks of the tables hold: a client that turns them off could also drop the tables."""

    def write(statement: str, values: Sequence[Any]) -> list[Any]:
        with closing(sqlite3.connect(file, timeout=10)) as connection:
            connection.text_factory = lambda text: text.decode(errors="replace")
            with suppress(sqlite3.Error, OverflowError, ValueError), connection:
                return connection.execute(statement.replace("$", "?"), values).fetchall()
        return []

    async def run(statement: str, values: Sequence[Any]) -> list[Any]:
        return await asyncio.to_thread(write, statement, values)

    return run


def _postgres_run(url: str, schema: str) -> Run:
    """Values travel as literals, so that the server and not the driver judges their type."""
    held: list[asyncpg.Connection[asyncpg.Record]] = []

    async def run(statement: str, values: Sequence[Any]) -> list[Any]:
        if not held:
            held.append(await asyncpg.connect(url, server_settings={"search_path": schema}))
        for number, value in enumerate(values, start=1):
            statement = statement.replace(f"${number}", _literal(value), 1)
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError):
            return list(await held[0].fetch(statement))
        return []

    return run


def _literal(value: Any) -> str:
    match value:
        case None:
            return "NULL"
        case int():
            return str(value)
        case bytes():
            return f"'\\x{value.hex()}'"
        case _:
            text = str(value).replace("'", "''").replace("\0", "").replace("$", "S")
            return f"'{text}'"


LAYOUTS: Mapping[str, Callable[[], Layout]] = {
    "streams": _streams,
    "bullmq": _bullmq,
    "omniq": _omniq,
}


def writer_of(subject: Subject, rng: Random) -> Writer:
    """The hostile client of a contract."""
    contract, store_url, queue_url = subject.name, subject.store_url, subject.url()
    if contract in LAYOUTS:
        return RedisWriter(LAYOUTS[contract](), store_url, queue_url, rng)
    if store_url.startswith("sqlite:"):
        run = _sqlite_run(Path(store_url.removeprefix("sqlite:///")))
        no_text = "CAST(x'61ff' AS TEXT)"
        return SqlWriter("inbox_jobs", run, queue_url, rng, unreadable=no_text)
    run = _postgres_run(store_url, "tenure")
    if not isinstance(subject, PlaneSubject):
        return SqlWriter("inbox_jobs", run, queue_url, rng)  # PostgreSQL refuses such text
    transport = Redis(subject.redis_url, name="hostile")
    return SqlWriter("plane_jobs", run, queue_url, rng, unreadable="'{'", transport=transport)
