"""What the conformance suite must know of a contract: how to open it, pass time, lose an answer.

Every folder under `contracts/` needs an adapter here. What a contract cannot do by its own text
stands in `cannot`, with the reason; the suite then checks that it refuses, instead of pretending.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tenure.contracts.memory import MemoryQueue, SharedStore, forget, share
from tenure.contracts.memory.store import MemoryOptions, MemoryStore
from tenure.contracts.streams.queue import SCRIPTS
from tenure.contracts.streams.shards import shard_of
from tenure.core.errors import ReplyLost
from tenure.core.registry import open_journal, open_ledger, open_queue
from tenure.core.seam import Journal, Ledger, Queue
from tenure.store.embedded import EmbeddedPostgres, EmbeddedRedis
from tests.contract.bullmq.adapter import BullmqAdapter
from tests.contract.inbox_stage import (
    PgbouncerInboxAdapter,
    PostgresInboxAdapter,
    SqliteInboxAdapter,
)
from tests.contract.omniq.adapter import OmniqAdapter
from tests.contract.plane_stage import (
    PostgresPlaneAdapter,
    PostgresRedisPlaneAdapter,
    RedisPlaneAdapter,
    SqlitePlaneAdapter,
)
from tests.contract.stages import StoredStage, Words, query_of, redis_stage
from tests.postgres_topologies import PgBouncer, pgbouncer
from tests.redis_topologies import redis_cluster, sentinel_set

T = TypeVar("T")
_unique = itertools.count(1)

CAPABILITIES = {
    "priority": "jobs with a lower priority number are claimed first",
    "ttl_before_start": "a job that was not started within its ttl ends as failed",
    "retry_by_options": "without a policy, the job's own attempts decide whether it runs again",
    "reject_event": "a refused write leaves a `reject` event in the journal",
    "token_in_journal": "the journal carries a hash of the lease's token",
    "lost_is_attempt": "a lease that ran out counts against the job's own attempts",
    "stored_schedules": "its schedules are records, and workers store the jobs that are due",
    "flows": "jobs can be chained and gathered",
    "one_order": "what was submitted first is claimed first, over the whole queue",
    "exact_depth": "a full queue holds as many jobs as its limit says, not about as many",
    "retention": "upkeep removes jobs that finished long ago, at a time the store's clock decides",
}
"""What a contract may lack, and what it means to have it."""


class Stage(Protocol):
    """One isolated queue for one test."""

    url: str
    words: Words
    lease_ms: int
    cannot: Mapping[str, str]
    ledger: Ledger
    journal: Journal

    def queue(self, worker_id: str = "") -> Queue:
        """Another instance of the queue; closed with the stage."""

    async def lossy_queue(self, worker_id: str) -> tuple[Queue, Callable[[], None]]:
        """An instance, and a function that makes it lose the answer to its next call."""

    async def advance(self, ms: int) -> None:
        """Let time pass on the store's clock."""

    async def close(self) -> None:
        """Let go of everything."""


def served_url(stage: Stage) -> str:
    """Where the jobs lie, for a gateway; a stage's own URL may be that of a worker far away."""
    return str(getattr(stage, "served_url", stage.url))


class Adapter(Protocol):
    """Makes stages of one contract. Options have the names of `MemoryOptions`."""

    name: str
    cannot: Mapping[str, str]

    async def open(self, **options: int) -> Stage:
        """A fresh, isolated queue."""


# --- memory ------------------------------------------------------------------------------------


class ManualClock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.ms


class LosingWire:
    """Executes each step, and loses the answer of the next one when told."""

    def __init__(self, shared: SharedStore) -> None:
        self._shared = shared
        self._loses = False

    def lose(self) -> None:
        self._loses = True

    async def __call__(self, operation: str, step: Callable[[MemoryStore], T], /) -> T:
        answer = self._shared.run(step)
        if self._loses:
            self._loses = False
            raise ReplyLost(f"the answer to {operation} was lost", contract="memory")
        return answer


_MEMORY_WORDS = Words("waiting", "running", "done", "failed", "cancelled")


@dataclass
class MemoryStage:
    clock: ManualClock
    shared: SharedStore
    lease_ms: int
    cannot: Mapping[str, str]
    words: Words = _MEMORY_WORDS
    url: str = field(init=False)
    ledger: Ledger = field(init=False)
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        share(self.shared)
        self.url = f"memory://{self.shared.store.name}"
        self.ledger = open_ledger(self.url)
        self.journal = open_journal(self.url)

    def queue(self, worker_id: str = "") -> Queue:
        return open_queue(self.url, worker_id=worker_id)

    async def lossy_queue(self, worker_id: str) -> tuple[Queue, Callable[[], None]]:
        wire = LosingWire(self.shared)
        return MemoryQueue(self.shared, worker_id=worker_id, wire=wire), wire.lose

    async def advance(self, ms: int) -> None:
        self.clock.ms += ms
        self.shared.wake()

    async def close(self) -> None:
        forget(self.shared.store.name)


class MemoryAdapter:
    name = "memory"
    cannot: Mapping[str, str] = {}

    async def open(self, **options: int) -> MemoryStage:
        options.setdefault("lease_ms", 10_000)
        clock = ManualClock()
        name = f"suite-{next(_unique)}"
        store = MemoryStore(name, MemoryOptions(**options), now_ms=clock)
        return MemoryStage(clock, SharedStore(store), options["lease_ms"], self.cannot)


# --- streams -----------------------------------------------------------------------------------


SHARDS = 3
_STREAMS_WORDS = Words("queued", "running", "done", "error", "canceled")


class StreamsAdapter:
    name = "streams"
    cannot: Mapping[str, str] = {
        "priority": "a Redis stream has one order; the contract's job hash has no priority",
        "ttl_before_start": "ttl_s is how long the keys live; an expired job is only counted",
        "retry_by_options": "the contract's failed job ends in error unless it names its attempts",
        "reject_event": "an extend that is refused writes nothing, so that it stays cheap",
        "token_in_journal": "the consumer's name is the token, and it stands there as worker_id",
        "retention": "finished jobs go by EXPIRE after ttl_s, which is whole seconds",
    }

    def __init__(self, server_url: Callable[[], str]) -> None:
        self._server_url = server_url

    async def open(self, **options: int) -> StoredStage:
        lease_ms = options.setdefault("lease_ms", 300)
        names = {"depth_max": "max_depth"}
        named = {names.get(name, name): value for name, value in options.items()}
        tag = f"suite:{os.getpid()}:{next(_unique)}"
        query = query_of({**named, "namespace": f"{{{tag}}}:"})
        return redis_stage(
            self,
            self._server_url(),
            query,
            lease_ms=lease_ms,
            words=_STREAMS_WORDS,
            scripts=SCRIPTS,
            tag=tag,
        )


class ShardedStreamsAdapter(StreamsAdapter):
    """The same with three shards; a proxy before one server needs all of them on it."""

    name = "streams_shards"
    cannot: Mapping[str, str] = {
        **StreamsAdapter.cannot,
        "one_order": "each shard has an order of its own",
        "exact_depth": "each shard has its part of the limit, and jobs spread by chance",
    }

    async def open(self, **options: int) -> StoredStage:
        stage = await super().open(**options, shards=SHARDS)
        stage.line_of = lambda job_id: str(shard_of(job_id, SHARDS))
        return stage


# --- all ---------------------------------------------------------------------------------------


class Servers:
    """The servers of one test process, started when first needed."""

    def __init__(self) -> None:
        self._topology = ExitStack()
        self._topology_url = ""
        self._redis: EmbeddedRedis | None = None
        self._postgres: EmbeddedPostgres | None = None
        self._poolers: dict[str, PgBouncer] = {}

    def redis(self) -> str:
        """The URL of a private Redis; `TENURE_REDIS_URL` names another one.

        `TENURE_REDIS_TOPOLOGY` is `cluster` or `sentinel` for a private one of that kind.
        """
        given = os.environ.get("TENURE_REDIS_URL") or self._topology_url
        if given:
            return given
        kind = os.environ.get("TENURE_REDIS_TOPOLOGY")
        if kind:
            if kind == "cluster":
                self._topology_url = self._topology.enter_context(redis_cluster()).url
            else:
                self._topology_url = self._topology.enter_context(sentinel_set()).url
            return self._topology_url
        if self._redis is None:
            self._redis = EmbeddedRedis(appendfsync="no")
            self._redis.start()
        return self._redis.url

    def postgres(self) -> str:
        """The URL of a private PostgreSQL; `TENURE_POSTGRES_URL` names another one.

        With `TENURE_POSTGRES_TOPOLOGY=pgbouncer` it is that of a PgBouncer in transaction mode.
        """
        if os.environ.get("TENURE_POSTGRES_TOPOLOGY") == "pgbouncer":
            return self.pgbouncer("transaction").url
        return self.postgres_itself()

    def postgres_itself(self) -> str:
        """The URL of the server itself."""
        given = os.environ.get("TENURE_POSTGRES_URL")
        if given:
            return given
        if self._postgres is None:
            self._postgres = EmbeddedPostgres()
            self._postgres.start()
        return self._postgres.url

    def pgbouncer(self, mode: str) -> PgBouncer:
        """A private PgBouncer before the server, in `session` or `transaction` mode."""
        if mode not in self._poolers:
            self._poolers[mode] = self._topology.enter_context(
                pgbouncer(self.postgres_itself(), mode)
            )
        return self._poolers[mode]

    def stop(self) -> None:
        self._topology.close()
        for server in (self._redis, self._postgres):
            if server is not None:
                server.stop()


def adapters(servers: Servers) -> dict[str, Adapter]:
    """An adapter for every contract folder, by its name; more where it has several stores."""
    every: list[Adapter] = [
        MemoryAdapter(),
        StreamsAdapter(servers.redis),
        BullmqAdapter(servers.redis),
        OmniqAdapter(servers.redis),
        SqliteInboxAdapter(),
        PostgresInboxAdapter(servers.postgres),
        PgbouncerInboxAdapter(lambda: servers.pgbouncer("transaction").url),
        SqlitePlaneAdapter(),
        PostgresPlaneAdapter(servers.postgres),
        RedisPlaneAdapter(servers.redis),
        PostgresRedisPlaneAdapter(servers.postgres, servers.redis),
    ]
    if os.environ.get("TENURE_REDIS_TOPOLOGY") != "cluster":
        every.append(ShardedStreamsAdapter(servers.redis))
    return {adapter.name: adapter for adapter in every}
