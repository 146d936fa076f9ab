"""`leasehold bridge`: move waiting jobs from one queue to another."""

from __future__ import annotations

import asyncio
import sys

import click
from click.termui import progressbar

from leasehold.cli.bridging import Bridge, Moved
from leasehold.cli.exits import Exit, Failed
from leasehold.cli.options import json_option
from leasehold.cli.output import emit, emit_text, note
from leasehold.core.errors import UsageError
from leasehold.core.opening import open_ledger, open_queue
from leasehold.dashboard.gathering import by_kind


@click.command("bridge", short_help="Move waiting jobs from one queue to another.")
@click.argument("from_url", metavar="FROM_URL")
@click.argument("to_url", metavar="TO_URL")
@click.option("--keep", is_flag=True, help="Keep the old job as done, instead of removing it.")
@click.option("--with-workers", is_flag=True, help="Go on although workers serve the old queue.")
@json_option
def command(from_url: str, to_url: str, keep: bool, with_workers: bool, as_json: bool) -> int:
    """Move what waits in one queue to another, of whichever contracts, each job exactly once.

    It may be stopped and started again: no job is lost, none arrives twice. Stop the workers of the
    old queue first.

    \b
    leasehold bridge 'bullmq+redis://127.0.0.1:6379/0?queue=mail' streams+redis://127.0.0.1:6379/0
    """
    if from_url == to_url:
        raise UsageError("a bridge needs two queues")
    moved = asyncio.run(_bridge(from_url, to_url, keep=keep, with_workers=with_workers))
    if as_json:
        emit({"moved": moved.moved, "replayed": moved.replayed, "refused": moved.refused})
    else:
        emit_text(f"{moved.moved} jobs moved, {moved.replayed} of them had arrived before")
        for job_id, why in moved.refused.items():
            note(f"leasehold: {job_id} stays where it is: {why}")
    return Exit.CONFLICT if moved.refused else Exit.OK


async def _bridge(from_url: str, to_url: str, *, keep: bool, with_workers: bool) -> Moved:
    ledger = open_ledger(from_url)
    source, target = open_queue(from_url, worker_id="leasehold-bridge"), open_queue(to_url)
    try:
        counts = await ledger.counts()
        if counts.workers and not with_workers:
            raise Failed(
                Exit.CONFLICT,
                f"{counts.workers} workers serve the old queue and could run a job that is on its "
                "way: stop them first (or say --with-workers)",
            )
        waiting = by_kind(counts).get("waiting", 0)
        with progressbar(length=waiting, label="moving", file=sys.stderr) as bar:
            way = Bridge(from_url, source, ledger, target, told=bar.update, keep=keep)
            return await way.run()
    finally:
        for part in (source, target, ledger):
            await part.close()
