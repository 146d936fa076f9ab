"""A queue over several slots: the names of its shards, which of them has a job, how many there are.

With `shards=N` a queue is N queues of the contract, each with a namespace and a hash tag of its
own. A job is in the shard that its id names, and so is everything that belongs to it. N decides
where a job is, so it is stored beside the queue, and nobody may use the queue with another N.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from itertools import count
from typing import TypeVar

import msgspec

from tenure.contracts.streams.options import CONTRACT, Options
from tenure.core.errors import ReplyLost, StoreUnreachable, UsageError
from tenure.core.registry import QueueUrl
from tenure.store.redis import Redis
from tenure.store.redis.cluster import SLOTS, slot_of
from tenure.store.redis_records import RedisRecords

T = TypeVar("T")
R = TypeVar("R")


def shard_of(name: str, shards: int) -> int:
    """The shard of a job id, or of another name.

    >>> [shard_of(name, 3) for name in ("a", "b", "order-17")]
    [1, 1, 0]
    """
    return binascii.crc32(name.encode(errors="replace")) % shards


@cache
def shard_namespaces(namespace: str, shards: int) -> tuple[str, ...]:
    """The namespaces of the shards, in their order.

    The slot of the first is in the first Nth of all slots, and so on, not near its edges. So they
    spread evenly over the nodes of a cluster that have equal ranges of slots.

    >>> shard_namespaces("{shop}:", 3)
    ('{shop:0.1}:', '{shop:1.4}:', '{shop:2.7}:')
    """
    name = namespace.replace("{", "").replace("}", "")
    width = SLOTS / shards
    found = []
    for shard in range(shards):
        tags = (f"{{{name}{shard}.{number}}}:" for number in count(1))
        least, most = (shard + 0.25) * width, (shard + 0.75) * width
        found.append(next(tag for tag in tags if least <= slot_of(tag) < most))
    return tuple(found)


def shard_options(options: Options) -> list[Options]:
    """The options of each shard; the limit of waiting jobs is divided among them."""
    depth = -(-options.max_depth // options.shards)
    return [
        msgspec.structs.replace(options, namespace=namespace, shards=1, max_depth=depth)
        for namespace in shard_namespaces(options.namespace, options.shards)
    ]


def shard_urls(url: QueueUrl) -> list[str]:
    """The URL of each shard as a queue of its own."""
    options, _ = url.read(Options)
    rest = {name: value for name, value in url.options.items() if name != "shards"}
    spaces = shard_namespaces(options.namespace, options.shards)
    return [url.with_options({**rest, "namespace": namespace}) for namespace in spaces]


class ShardCheck:
    """Compares the shards of the URL with those of the queue, once; `begins` stores them too."""

    def __init__(self, redis: Redis, options: Options, *, begins: bool = False) -> None:
        self._redis = redis
        self._key = f"{options.namespace}jobs:shards"
        self._stream = f"{options.namespace}jobs:stream"
        self._shards = options.shards
        self._begins = begins and options.shards > 1
        self.done = False

    async def __call__(self) -> None:
        """Raise `UsageError` if the queue has another number of shards."""
        if self.done:
            return
        is_new = self._begins and await self._redis.call("SET", self._key, self._shards, "NX")
        if is_new and (waiting := await self._redis.call("XLEN", self._stream)):
            await self._redis.call("DEL", self._key)
            raise UsageError(
                f"{waiting} jobs are in this queue from a time when it had no shards; let workers "
                "without shards= in their URL finish them first, or choose another namespace",
                contract=CONTRACT,
            )
        stored = await self._redis.call("GET", self._key)
        if stored is not None and stored != b"%d" % self._shards:
            asked = f"shards={self._shards}" if self._shards > 1 else "no shards"
            raise UsageError(
                f"this queue has {stored.decode(errors='replace')} shards ({self._key}), and the "
                f"URL says {asked}: write shards={stored.decode(errors='replace')}",
                contract=CONTRACT,
            )
        self.done = True


async def gather_all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The answers of shards that are asked at the same time; calls to one node share a write.

    All calls end before an error is raised. It is `ReplyLost` if a shard may have executed its call
    and another one was not reached.
    """
    answers = await asyncio.gather(*calls, return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if not errors:
        return [answer for answer in answers if not isinstance(answer, BaseException)]
    error = next((each for each in errors if not isinstance(each, StoreUnreachable)), errors[0])
    if isinstance(error, StoreUnreachable) and len(errors) < len(answers):
        raise ReplyLost(f"{error}; other shards executed their part of the call") from error
    raise error


async def spread(
    items: Sequence[T],
    job_id_of: Callable[[T], str],
    shards: int,
    send: Callable[[int, Sequence[T]], Awaitable[Sequence[R]]],
) -> list[R]:
    """Send each item to the shard of its job; the answers to all items, in their order."""
    parts: dict[int, list[int]] = {}
    for at, item in enumerate(items):
        parts.setdefault(shard_of(job_id_of(item), shards), []).append(at)
    calls = [send(shard, [items[at] for at in places]) for shard, places in parts.items()]
    answers: dict[int, R] = {}
    for places, found in zip(parts.values(), await gather_all(calls), strict=True):
        answers.update(zip(places, found, strict=True))
    return [answers[at] for at in range(len(items))]


class ShardedRecords:
    """The records of a queue with shards: each group is in the shard that its name names."""

    def __init__(self, redis: Redis, namespaces: Sequence[str]) -> None:
        self._shards = [RedisRecords(redis, f"{namespace}jobs:") for namespace in namespaces]

    def _of(self, group: str) -> RedisRecords:
        return self._shards[shard_of(group, len(self._shards))]

    async def read(self, group: str) -> tuple[int, dict[str, str]]:
        """The time of its server, and the records of a group by name."""
        return await self._of(group).read(group)

    async def get(self, group: str, name: str) -> str:
        """One record, "" if there is none."""
        return await self._of(group).get(group, name)

    async def swap(
        self, group: str, name: str, before: str, after: str, *, keep_ms: int = 0
    ) -> bool:
        """Replace a record that is `before` by `after`; True if it is `after` now."""
        return await self._of(group).swap(group, name, before, after, keep_ms=keep_ms)

    async def size(self, group: str) -> int:
        """How many records a group has."""
        return await self._of(group).size(group)

    async def expire(self, group: str, keep_ms: int) -> None:
        """Keep a group for so long only."""
        await self._of(group).expire(group, keep_ms)
