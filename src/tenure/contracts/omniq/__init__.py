"""The `omniq` contract: OmniQ's queue in Redis, with groups, by its own client and by the seam.

Here are its descriptor and the names of its client, which are imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tenure.core.registry import Contract, QueueUrl
from tenure.core.state import Machine

if TYPE_CHECKING:
    from tenure.contracts.omniq.client import Client as Client
    from tenure.contracts.omniq.client import Paused as Paused
    from tenure.contracts.omniq.client import Reserved as Reserved
    from tenure.contracts.omniq.client import SyncClient as SyncClient
    from tenure.contracts.omniq.consume import JobContext as JobContext
    from tenure.contracts.omniq.ledger import OmniqJournal as OmniqJournal
    from tenure.contracts.omniq.ledger import OmniqLedger as OmniqLedger
    from tenure.contracts.omniq.options import NotActive as NotActive
    from tenure.contracts.omniq.options import Options
    from tenure.contracts.omniq.options import Refused as Refused
    from tenure.contracts.omniq.options import TokenMismatch as TokenMismatch
    from tenure.contracts.omniq.queue import OmniqQueue as OmniqQueue
    from tenure.core.journal import StreamFormat
    from tenure.store.redis import Redis

__all__ = [
    "Client",
    "JobContext",
    "NotActive",
    "OmniqJournal",
    "OmniqLedger",
    "OmniqQueue",
    "Paused",
    "Refused",
    "Reserved",
    "SyncClient",
    "TokenMismatch",
]

_MODULE_OF = {
    "Client": "client",
    "JobContext": "consume",
    "NotActive": "options",
    "OmniqJournal": "ledger",
    "OmniqLedger": "ledger",
    "OmniqQueue": "queue",
    "Paused": "client",
    "Refused": "options",
    "Reserved": "client",
    "SyncClient": "client",
    "TokenMismatch": "options",
}
_EXAMPLE = "omniq+redis://host:6379/0?queue=name"

MACHINE = Machine(
    contract="omniq",
    initial=("wait", "delayed"),
    running=("active",),
    final=("completed", "failed"),
    steps={
        "wait": ("active", "failed"),
        "delayed": ("wait", "active", "failed"),
        "active": ("completed", "failed", "delayed", "wait"),
    },
    reopen={"failed": ("wait",)},
)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def _redis(url: QueueUrl) -> tuple[Redis, Options]:
    from tenure.contracts.omniq.options import Options
    from tenure.store.redis_queue import open_redis

    return open_redis(url, Options, _EXAMPLE)


def _open_queue(url: QueueUrl, worker_id: str) -> OmniqQueue:
    from tenure.contracts.omniq.queue import OmniqQueue

    return OmniqQueue(*_redis(url), worker_id=worker_id)


def _open_ledger(url: QueueUrl) -> OmniqLedger:
    from tenure.contracts.omniq.ledger import OmniqLedger

    return OmniqLedger(*_redis(url))


def _open_journal(url: QueueUrl) -> OmniqJournal:
    from tenure.contracts.omniq.ledger import OmniqJournal

    return OmniqJournal(*_redis(url))


def _read_options(url: QueueUrl) -> tuple[Options, str]:
    from tenure.contracts.omniq.options import Options

    return url.read(Options)


def _journal_format(url: QueueUrl) -> StreamFormat:
    from tenure.contracts.omniq.ledger import stream_format

    options, store = _read_options(url)
    return stream_format(store, options)


def _samples() -> Sequence[Any]:
    from tenure.contracts.omniq.samples import FLOWS

    return FLOWS


CONTRACT = Contract(
    machine=MACHINE,
    open_queue=_open_queue,
    open_ledger=_open_ledger,
    open_journal=_open_journal,
    read_options=_read_options,
    example_url=_EXAMPLE,
    journal_format=_journal_format,
    samples=_samples,
    submit_example=(
        "Python, with the contract's own client",
        """\
import asyncio, json
from tenure.contracts.omniq import Client

async def main():
    async with Client('{store}') as client:
        print(await client.publish('{short}', json.loads({quoted})))

asyncio.run(main())""",
    ),
    foreign_writers=True,
    is_timed=True,
    submit_options=frozenset({"group"}),
    has_flows=False,  # version 1 has no step that ends one job and begins another
)
