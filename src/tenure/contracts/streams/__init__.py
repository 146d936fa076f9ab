"""The `streams` contract: a Redis Streams queue with a hash and an event stream per job.

Here is its descriptor. What it opens is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tenure.core.registry import Contract, Finding, QueueUrl
from tenure.core.state import Machine

if TYPE_CHECKING:
    from tenure.contracts.streams.options import Options
    from tenure.core.endpoint import Endpoint, Submits
    from tenure.core.journal import StreamFormat
    from tenure.core.seam import Journal, Ledger, Queue
    from tenure.store.redis import Redis

_EXAMPLE = "streams+redis://host:6379/0"

MACHINE = Machine(
    contract="streams",
    initial=("queued",),
    running=("running",),
    final=("done", "error", "canceled"),
    cancelled=("canceled",),
    steps={
        "queued": ("running", "error", "canceled"),
        "running": ("queued", "done", "error", "canceled"),
    },
    reopen={"done": ("queued",), "error": ("queued",), "canceled": ("queued",)},
)


def _redis(url: QueueUrl) -> tuple[Redis, Options]:
    from tenure.contracts.streams.options import Options
    from tenure.store.redis_queue import open_redis

    return open_redis(url, Options, _EXAMPLE)


def _open_queue(url: QueueUrl, worker_id: str) -> Queue:
    redis, options = _redis(url)
    if options.shards > 1:
        from tenure.contracts.streams.sharded_queue import ShardedQueue

        return ShardedQueue(redis, options, worker_id=worker_id)
    from tenure.contracts.streams.queue import StreamsQueue

    return StreamsQueue(redis, options, worker_id=worker_id)


def _open_ledger(url: QueueUrl) -> Ledger:
    redis, options = _redis(url)
    if options.shards > 1:
        from tenure.contracts.streams.sharded_ledger import ShardedLedger

        return ShardedLedger(redis, options)
    from tenure.contracts.streams.ledger import StreamsLedger

    return StreamsLedger(redis, options)


def _open_journal(url: QueueUrl) -> Journal:
    redis, options = _redis(url)
    if options.shards > 1:
        from tenure.contracts.streams.sharded_ledger import ShardedJournal

        return ShardedJournal(redis, options)
    from tenure.contracts.streams.ledger import StreamsJournal

    return StreamsJournal(redis, options)


def _read_options(url: QueueUrl) -> tuple[Options, str]:
    from tenure.contracts.streams.options import Options

    return url.read(Options)


def _journal_format(url: QueueUrl) -> StreamFormat | None:
    from tenure.contracts.streams.ledger import stream_format

    options, store = _read_options(url)
    return stream_format(store, options) if options.shards == 1 else None


def _journals(url: QueueUrl) -> Sequence[str]:
    if _read_options(url)[0].shards == 1:
        return ()
    from tenure.contracts.streams.shards import shard_urls

    return shard_urls(url)


def _routes(submits: Submits, ledger: Any, queue: Any, **given: Any) -> list[Endpoint]:
    from tenure.contracts.streams.routes import open_routes

    return open_routes(submits, ledger, **given)


def _samples() -> Sequence[Any]:
    from tenure.contracts.streams.samples import FLOWS

    return FLOWS


async def _doctor(url: QueueUrl, redis: Redis) -> list[Finding]:
    from tenure.contracts.streams.doctor import queue_findings

    return await queue_findings(redis, _read_options(url)[0])


CONTRACT = Contract(
    machine=MACHINE,
    open_queue=_open_queue,
    open_ledger=_open_ledger,
    open_journal=_open_journal,
    read_options=_read_options,
    example_url=_EXAMPLE,
    journal_format=_journal_format,
    journals=_journals,
    routes=_routes,
    samples=_samples,
    doctor=_doctor,
    submit_example=(
        "curl, the contract's own endpoint",
        """\
curl -s {base}/v1/jobs -H 'content-type: application/json' \\
  -d '{{"task": "chat", "payload": {{"prompt": "Say hello."}}}}'""",
    ),
    lost_max_option="lost_max",
    is_fifo=True,
    is_timed=True,
    submit_options=frozenset({"ttl_s"}),
)
