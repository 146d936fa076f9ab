"""What the chaos harness must know of a contract: its store, its URL, its HTTP side, its traces.

A new contract on Redis adds one `Profile` here and its name to `SUBJECTS`; one on another store a
class as well. Everything else is the same for all.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from tenure.contracts.bullmq import options as bullmq
from tenure.contracts.bullmq.scripts import SCRIPTS as BULLMQ_SCRIPTS
from tenure.contracts.omniq.calls import SCRIPTS as OMNIQ_SCRIPTS
from tenure.contracts.streams import options as streams
from tenure.contracts.streams.queue import SCRIPTS as STREAMS_SCRIPTS
from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import Redis, Script
from tests.chaos.effects import now_ms
from tests.chaos.plane_subject import PlaneSubject

Fsync = Literal["everysec", "always"]
VERBS = ("submit", "claim", "extend", "report", "settle")


class Subject(Protocol):
    """One contract on a private store that may be killed."""

    name: str
    fsync: Fsync
    async_task: str  # a task name that the contract takes, for handlers in the loop
    thread_task: str  # ... and for the handler in a thread
    retries: Mapping[str, Any]  # options of a job that may fail and be tried again
    jobs_path: str  # where its gateway takes jobs; "" for a contract without an HTTP side

    def claims_until_lost(self, lost_max: int) -> int:
        """How often a job is claimed whose lease may run out so often, until it has failed."""

    async def start(self) -> None:
        """Start the store, or start it again on the same data and address."""

    async def stop(self) -> None:
        """End the store and let go of its data."""

    async def warm(self) -> None:
        """Make the store know what it will be asked, so that a lost reply is one to a real call."""

    async def kill(self) -> None:
        """kill -9 of the store."""

    async def wipe(self) -> None:
        """Remove the data of a killed store."""

    def url(self, store_url: str = "") -> str:
        """The queue URL; `store_url` leads through a proxy."""

    @property
    def store_url(self) -> str:
        """Where the store listens, for a proxy."""

    def verb(self, command: Sequence[bytes]) -> str:
        """Which verb of the seam a command on the wire serves; "" for none."""

    def all_outside(self) -> AbstractContextManager[None]:
        """Nobody is where one who stands still would keep all others from the store."""

    async def residue(self) -> dict[str, int]:
        """What must be empty when all is done."""


@dataclass(frozen=True)
class Profile:
    """A contract on Redis. `verbs` are the scripts that serve a verb under another name."""

    name: str
    scripts: dict[str, Script]
    residue: Callable[[Redis, Mapping[str, Any]], Awaitable[dict[str, int]]]
    query: Callable[[dict[str, int]], dict[str, object]]
    jobs_path: str = ""
    verbs: Mapping[str, str] = field(default_factory=dict)
    more_claims: int = 0


class RedisSubject:
    """A contract on a Redis with an append-only file."""

    async_task = "chat"
    thread_task = "tool"
    retries: Mapping[str, Any] = {"max_attempts": 20}

    def __init__(
        self, profile: Profile, folder: Path, *, fsync: Fsync = "everysec", **options: int
    ) -> None:
        self.name = profile.name
        self.jobs_path = profile.jobs_path
        self.fsync: Fsync = fsync
        self._profile = profile
        self._data = folder / "redis"
        self._server = EmbeddedRedis(self._data, appendfsync=fsync)
        self._query = profile.query(options)
        self._verbs: dict[bytes, str] = {}
        for name, script in profile.scripts.items():
            verb = profile.verbs.get(name, name)
            self._verbs |= {script.sha.encode(): verb, script.source.encode(): verb}

    def claims_until_lost(self, lost_max: int) -> int:
        return lost_max + self._profile.more_claims

    @property
    def store_url(self) -> str:
        return self._server.url

    def url(self, store_url: str = "") -> str:
        query = "&".join(f"{name}={value}" for name, value in self._query.items())
        return f"{self.name}+{store_url or self.store_url}?{query}"

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)

    async def warm(self) -> None:
        async with self._client() as redis:
            for script in self._profile.scripts.values():
                await redis.call("SCRIPT", "LOAD", script.source)

    async def kill(self) -> None:
        """With `everysec`, at a moment when no fsync is under way.

        While one is, Redis keeps writes that it has already acknowledged in its own memory (for up
        to two seconds); to kill it then is to cut the power, and what that may cost is stated for
        the contract. At every other moment an acknowledged write is the kernel's, and must survive.
        """
        if self.fsync == "everysec":
            await self._until_no_fsync()
        await asyncio.to_thread(self._server.kill)

    async def wipe(self) -> None:
        for path in self._data.glob("appendonly*"):  # a folder since Redis 7, a file before
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def verb(self, command: Sequence[bytes]) -> str:
        if len(command) < 2 or command[0].upper() not in (b"EVALSHA", b"EVAL"):
            return ""
        verb = self._verbs.get(command[1], "")
        return verb if verb in VERBS else ""

    def all_outside(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def residue(self) -> dict[str, int]:
        async with self._client() as redis:
            return await self._profile.residue(redis, self._query)

    async def _until_no_fsync(self) -> None:
        """An fsync begins with the first write of a second; a good way into it, it is over."""
        async with self._client() as redis:
            while True:
                info = await redis.call("INFO", "persistence")
                assert b"aof_pending_bio_fsync" in info, "the server has no append-only file"
                if b"aof_pending_bio_fsync:0" in info and 300 <= now_ms() % 1000 <= 900:
                    return
                await asyncio.sleep(0.01)  # the server tells nobody when an fsync ends

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Redis]:
        redis = Redis(self.store_url, name="chaos")
        try:
            yield redis
        finally:
            await redis.close()


async def _streams_residue(redis: Redis, query: Mapping[str, Any]) -> dict[str, int]:
    stream, _, delayed, *_ = streams.keys(query.get("namespace", ""))
    pending = await redis.call("XPENDING", stream, streams.GROUP)
    return {
        "stream entries": await redis.call("XLEN", stream),
        "pending entries": pending[0],
        "delayed jobs": await redis.call("ZCARD", delayed),
    }


async def _bullmq_residue(redis: Redis, query: Mapping[str, Any]) -> dict[str, int]:
    """Everything that BullMQ keeps of a job that has not ended, and the locks."""
    prefix = bullmq.Options(prefix=query.get("prefix", "bull")).key_prefix
    wait, active, prioritized, delayed, paused, *_ = bullmq.keys(prefix)
    lists = {name: await redis.call("LLEN", name) for name in (wait, active, paused)}
    sets = {name: await redis.call("ZCARD", name) for name in (prioritized, delayed)}
    locks = await redis.call("KEYS", f"{prefix}*:lock")
    return {**lists, **sets, "locks": len(locks)}


def _bullmq_query(options: dict[str, int]) -> dict[str, object]:
    """A lease may run out `stalled_max` times without harm; the next time is the last."""
    given = dict(options)
    return {"stalled_max": given.pop("lost_max") - 1, "stalled_ms": 1_000, **given}


_OMNIQ_QUEUE = "chaos"


async def _omniq_residue(redis: Redis, query: Mapping[str, Any]) -> dict[str, int]:
    """Lanes of jobs that have not ended, and the slots of groups."""
    base = f"{{{query['queue']}}}"
    left = {
        "waiting": await redis.call("LLEN", f"{base}:wait"),
        "active": await redis.call("ZCARD", f"{base}:active"),
        "delayed": await redis.call("ZCARD", f"{base}:delayed"),
        "groups": len(await redis.call("KEYS", f"{base}:g:*:*t")),  # their lists and counts
    }
    for state in ("wait", "active", "delayed"):
        left[f"idx:{state}"] = await redis.call("ZCARD", f"{base}:idx:{state}")
    told = await redis.call(
        "HMGET", f"{base}:stats", "waiting_total", "active", "delayed", "groups_ready"
    )
    return {**left, "stats": sum(int(value or 0) for value in told)}


def _omniq_query(options: dict[str, int]) -> dict[str, object]:
    """A lost lease is an attempt; a job without a backoff is claimed again before what came later;
    all finished jobs are kept for the judge."""
    given = dict(options)
    return {
        "queue": _OMNIQ_QUEUE,
        "timeout_ms": given.pop("lease_ms"),
        "max_attempts": given.pop("lost_max"),
        "backoff_ms": 0,
        "keep_completed": 1_000_000,
        "keep_failed": 0,
        **given,
    }


STREAMS = Profile(
    name="streams",
    scripts=STREAMS_SCRIPTS,
    residue=_streams_residue,
    # A hostile record may be running without a lease, as jobs of other workers are.
    query=lambda options: {
        "retry_delay_ms": 100,
        "foreign_lease_ms": options["lease_ms"],
        **options,
    },
    jobs_path="/v1/jobs",
)
BULLMQ = Profile(
    name="bullmq",
    scripts=BULLMQ_SCRIPTS,
    residue=_bullmq_residue,
    query=_bullmq_query,
    verbs={"add": "submit"},
    more_claims=1,  # the pickup that fails a job which was lost too often is a start as well
)
OMNIQ = Profile(
    name="omniq",
    scripts=OMNIQ_SCRIPTS,
    residue=_omniq_residue,
    query=_omniq_query,
    verbs={"publish": "submit"},
)
PROFILES = {profile.name: profile for profile in (STREAMS, BULLMQ, OMNIQ)}
ON_REDIS: dict[str, Callable[..., Subject]] = {
    name: partial(RedisSubject, profile) for name, profile in PROFILES.items()
}
SUBJECTS = ON_REDIS | {"plane": PlaneSubject}


def tried() -> list[str]:
    """Contracts that go through the longer scenarios: in a short run one stands for all.

    `TENURE_CHAOS=all` takes every one. Kills, lost replies and planted faults are always tried
    on every contract.
    """
    return list(SUBJECTS) if os.environ.get("TENURE_CHAOS") == "all" else ["streams"]
