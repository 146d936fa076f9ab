"""The limit: our own statements, claim and settle in batches, without a worker around them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from bench_kit import probe, serve, use_uvloop

from tenure import open_queue
from tenure.core.outcome import Outcome

BATCH = 500
LANES = 2


def _inbox() -> object:
    """The other adapter, under another name than this file's own."""
    import importlib.util

    path = Path(__file__).resolve().parents[1] / "tenure_inbox" / "adapter.py"
    spec = importlib.util.spec_from_file_location("inbox_adapter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


inbox = _inbox()


async def lane(number: int) -> None:
    queue = open_queue(inbox.URL, worker_id=f"bare-{number}")  # type: ignore[attr-defined]
    while leases := await queue.claim(BATCH, wait_ms=0):
        for _ in leases:
            probe.noop()
        await queue.settle([Outcome(lease, "complete") for lease in leases])


async def work() -> None:
    await asyncio.gather(*map(lane, range(LANES)))
    await asyncio.Event().wait()  # until it is ended


async def make() -> object:
    producer = await inbox.make()  # type: ignore[attr-defined]
    producer.notes = f"our statements in batches of {BATCH}, {LANES} in flight, no worker"
    return producer


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        use_uvloop()
        asyncio.run(work())
    else:
        serve(make)  # type: ignore[arg-type]
