"""A writer that puts random types, values, encodings and sizes into the keys of a live queue.

It leaves alone what is another's by right: the hashes of good jobs, the `paused` flag, whose
presence alone pauses, and members of `active`, which are the leases themselves.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import redis

LANES = ("wait", "active", "delayed", "completed", "failed", "g:g0:wait", "g:g1:wait")
KEYS = (
    *LANES,
    *("stats", "groups:ready", "has_groups", "lane:rr", "lease:seq", "template", "upkeep"),
    *("g:g0:inflight", "g:g1:inflight", "g:g0:limit", "g:g1:limit"),
    *("idx:wait", "idx:active", "idx:delayed", "idx:completed", "idx:failed"),
    *("journal", "wake", "claims", "counters", "workers", "quarantine", "quarantine:new"),
)
FIELDS = (
    *("state", "payload", "attempt", "max_attempts", "timeout_ms", "backoff_ms", "created_ms"),
    *("gid", "lease_token", "lock_until_ms", "due_ms", "tn", "task", "trace", "queued_ms"),
)
SCORES = (0.0, -1.0, 5e15, 1e300, float("inf"), float("-inf"), 1.5)


class Hostile:
    """Acts on one queue; the same seed does the same."""

    def __init__(self, raw: redis.Redis, queue: str, seed: int) -> None:
        self._raw = raw
        self._base = f"{{{queue}}}:".encode()
        self._random = random.Random(seed)
        self._acts: list[Callable[[], None]] = [
            self._replace_key,
            self._replace_key,
            self._add_members,
            self._plant_record,
            self._plant_record,
            self._disturb_fields,
        ]

    def act(self) -> None:
        """One thing that no good program would do."""
        # The queue may write a key again between two commands; then the second finds another type.
        with contextlib.suppress(redis.ResponseError):
            self._random.choice(self._acts)()

    def _key(self, name: str) -> bytes:
        return self._base + name.encode()

    def value(self) -> bytes:
        choice = self._random
        kinds: list[Callable[[], bytes]] = [
            lambda: choice.choice([b"", b"[[", b"nan", b"inf", b"-inf", b"-1", b"0", b"1e999"]),
            lambda: choice.choice([b"\xff\xfe", b"\xed\xa0\x80", b"\x00", b"\t\n\r", b"{}", b"'"]),
            lambda: str(choice.randint(-(2**70), 2**70)).encode(),
            lambda: choice.randbytes(choice.randint(0, 64)),
            lambda: b"x" * choice.choice([100, 5_000, 200_000]),
            lambda: choice.choice([b"wait", b"active", b"delayed", b"failed", b"completed"]),
            lambda: b"1 0 active 99999999999999999999 w - - 0",
        ]
        return choice.choice(kinds)()

    def _write(self, key: bytes, kind: str) -> None:
        raw, value, some = self._raw, self.value, range(self._random.randint(1, 4))
        match kind:
            case "string":
                raw.set(key, value())
            case "list":
                raw.rpush(key, *[value() for _ in some])
            case "set":
                raw.sadd(key, *[value() for _ in some])
            case "hash":
                raw.hset(key, mapping={value(): value() for _ in some})
            case "zset":
                raw.zadd(key, {value(): self._random.choice(SCORES) for _ in some})
            case _:
                top = f"{2**64 - 1}-{2**64 - 1}" if self._random.random() < 0.3 else "*"
                raw.xadd(key, {value(): value() for _ in some}, id=top)

    def _replace_key(self) -> None:
        name = self._random.choice(KEYS)
        kind = self._random.choice(["string", "list", "set", "hash", "zset", "stream"])
        if name in ("active", "idx:active") and kind == "zset":
            return
        self._raw.delete(self._key(name))
        self._write(self._key(name), kind)

    def _add_members(self) -> None:
        """Junk beside what is there, of the type that is there."""
        key = self._key(self._random.choice(KEYS))
        found = self._raw.type(key).decode()
        if found != "string" and found != "none":
            self._write_anyhow(lambda: self._write(key, found))

    def _plant_record(self) -> None:
        """A job of the writer's own making in a lane of its choice, readable or not."""
        job_id = self._random.choice([b"bad-", b"\xff", b""]) + self.value()[:3_000]
        key, names = self._key("job:") + job_id, self._random.sample(FIELDS, 6)
        if self._random.random() < 0.3:
            self._raw.delete(key)
            self._write(key, self._random.choice(["string", "list", "set", "zset", "stream"]))
        else:
            whole: dict[str, Any] = {"id": job_id, "state": "wait", "payload": "{}"}
            whole |= {name: self.value() for name in names}
            self._write_anyhow(lambda: self._raw.hset(key, mapping=whole))
        lane = self._random.choice(LANES)
        if lane in ("active", "delayed"):
            score = self._random.choice(SCORES)
            self._write_anyhow(lambda: self._raw.zadd(self._key(lane), {job_id: score}))
        else:
            push = self._random.choice([self._raw.lpush, self._raw.rpush])
            self._write_anyhow(lambda: push(self._key(lane), job_id))
        if self._random.random() < 0.5:
            self._write_anyhow(lambda: self._raw.zadd(self._key("groups:ready"), {"g0": 1}))

    def _disturb_fields(self) -> None:
        """Other values under the names that are used."""
        name = self._random.choice(["stats", "counters", "upkeep", "claims", "workers"])
        key = self._key(name)
        self._write_anyhow(
            lambda: [self._raw.hset(key, field, self.value()) for field in self._raw.hkeys(key)]
        )

    def _write_anyhow(self, write: Callable[[], Any]) -> None:
        with contextlib.suppress(redis.ResponseError):  # of another type by now: as good
            write()
