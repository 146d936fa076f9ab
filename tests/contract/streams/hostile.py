"""A program that writes random types and values into every key of a queue."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from redis.exceptions import ResponseError

STRUCTURE = (
    "stream", "journal", "delayed", "wake", "upkeep", "stats", "index", "workers", "paused",
    "quarantine",
)  # fmt: skip
FIELDS = (
    "status", "lease", "entry", "ttl_s", "created_ts", "updated_ts", "task", "payload", "due_ms",
    "settled", "cancel", "result", "error", "request_h",
)  # fmt: skip
VALUES: tuple[bytes, ...] = (
    b"", b"x", b"-1", b"0.5", b"1e999", b"nan", b"inf", b"9" * 400, b"\x00", b"\xff\xfe", b"{}",
    b"[" * 2000, b"running", b"done", b"1 2 3", b"0 1 0 0 0 0 -", b"abc 1 -", b"a\tb\nc",
    b"\xed\xa0\x80", b"v" * 70_000,
)  # fmt: skip


class Hostile:
    """`once` writes one bad record; every choice follows from the seed."""

    def __init__(self, redis: Any, namespace: str, seed: int) -> None:
        self._redis = redis
        self._ns = namespace
        self._random = random.Random(seed)
        self._acts: tuple[Callable[[], Any], ...] = (
            self._bad_job, self._bad_job, self._bad_events, self._bad_entry, self._bad_entry,
            self._bad_field, self._bad_member, self._bad_key, self._bad_idempotency,
        )  # fmt: skip

    async def once(self) -> None:
        """One hostile act; one that meets a key of another type by now has failed."""
        with suppress(ResponseError):
            await self._random.choice(self._acts)()

    def _value(self) -> bytes:
        if self._random.random() < 0.3:
            return self._random.randbytes(self._random.randrange(1, 60))
        return self._random.choice(VALUES)

    def _id(self) -> str:
        return f"bad-{self._random.randrange(10_000)}"

    async def _put(self, key: str) -> None:
        """Something of a random type, in place of what was there."""
        value, redis = self._value(), self._redis
        await redis.delete(key)
        match self._random.choice(("string", "list", "set", "zset", "hash", "stream")):
            case "string":
                await redis.set(key, value)
            case "list":
                await redis.rpush(key, value)
            case "set":
                await redis.sadd(key, value)
            case "zset":
                await redis.zadd(key, {value: self._random.choice((0, 1e300, "inf", "-inf"))})
            case "hash":
                await redis.hset(key, mapping={self._random.choice(FIELDS): value})
            case "stream":
                await redis.xadd(key, {self._value(): value})

    async def _entry(self, job_id: bytes) -> None:
        fields: dict[bytes, bytes] = {b"job_id": job_id, b"task": b"good", b"payload": b"{}"}
        if self._random.random() < 0.3:
            fields[self._random.choice(list(fields))] = self._value()
        if self._random.random() < 0.2:
            fields.pop(self._random.choice(list(fields)))
            fields[b"other"] = self._value()
        await self._redis.xadd(f"{self._ns}jobs:stream", fields)

    async def _bad_job(self) -> None:
        job_id, redis = self._id(), self._redis
        key = f"{self._ns}job:{job_id}"
        if self._random.random() < 0.5:
            await self._put(key)
        else:
            fields = {"status": "queued", "task": "good", "payload": "{}", "ttl_s": "60"}
            fields |= {self._random.choice(FIELDS): self._value()}
            await redis.delete(key)
            await redis.hset(key, mapping=fields)
        await self._entry(job_id.encode())

    async def _bad_events(self) -> None:
        job_id = self._id()
        key = f"{self._ns}job:{job_id}"
        await self._redis.delete(key)
        await self._redis.hset(key, mapping={"status": "queued", "ttl_s": "60"})
        await self._put(f"{key}:events")
        await self._entry(job_id.encode())

    async def _bad_entry(self) -> None:
        await self._entry(self._value())

    async def _bad_field(self) -> None:
        name = self._random.choice(("upkeep", "stats", "workers"))
        fields = ("search_at", "tidy_at", "captured", "repair", "done", "started", "submitted")
        field = self._random.choice(fields)
        if name == "workers":
            field = self._random.choice(("w1", "w2", "someone"))
        await self._redis.hset(f"{self._ns}jobs:{name}", field, self._value())

    async def _bad_member(self) -> None:
        name = self._random.choice(("delayed", "index"))
        score = self._random.choice((0, 1, 1e300, "inf", "-inf"))
        member = self._random.choice((self._value(), self._id().encode()))
        await self._redis.zadd(f"{self._ns}jobs:{name}", {member: score})

    async def _bad_key(self) -> None:
        name = self._random.choice(STRUCTURE)
        if name == "paused":  # a number there is a pause, which is not bad
            await self._redis.set(f"{self._ns}jobs:paused", b"x" + self._value())
        elif self._random.random() < 0.3:
            await self._put(f"{self._ns}jobs:{name}")

    async def _bad_idempotency(self) -> None:
        await self._put(f"{self._ns}idempotency:key-{self._random.randrange(50)}")
