"""`tenure bridge`: move waiting jobs from one queue to another."""

from __future__ import annotations

import asyncio
import sys

import click
from click.termui import progressbar

from tenure.cli.bridging import NAME, Bridge, Moved, patient
from tenure.cli.exits import Exit, Failed
from tenure.cli.options import json_option
from tenure.cli.output import emit, emit_text, note
from tenure.core.errors import UsageError
from tenure.core.registry import open_ledger, open_queue
from tenure.core.seam import Ledger, Staffed
from tenure.dashboard.gathering import by_kind


@click.command("bridge", short_help="Move waiting jobs from one queue to another.")
@click.argument("from_url", metavar="FROM_URL")
@click.argument("to_url", metavar="TO_URL")
@click.option("--keep", is_flag=True, help="Keep the old job as done, instead of removing it.")
@click.option("--plain", is_flag=True, help="Leave out groups and priorities.")
@click.option("--with-workers", is_flag=True, help="Go on although workers serve the old queue.")
@json_option
def command(
    from_url: str, to_url: str, keep: bool, plain: bool, with_workers: bool, as_json: bool
) -> int:
    """Move what waits in one queue to another, of whichever contracts, each job exactly once.

    It may be stopped and started again: no job is lost, none arrives twice. Stop the workers of the
    old queue first. Jobs that the new queue does not take stay where they are, and are named; where
    it has no groups or no priorities, --plain leaves them out.

    \b
    tenure bridge 'bullmq+redis://127.0.0.1:6379/0?queue=mail' streams+redis://127.0.0.1:6379/0
    """
    if from_url == to_url:
        raise UsageError("both URLs name the same queue; a bridge needs two")
    moved = asyncio.run(_bridge(from_url, to_url, keep, plain, with_workers))
    if as_json:
        emit({"moved": moved.moved, "replayed": moved.replayed, "refused": moved.refused})
    else:
        emit_text(f"{moved.moved} jobs moved, {moved.replayed} of them had arrived before")
        for job_id, why in moved.refused.items():
            note(f"tenure: {job_id} stays where it is: {why}")
    return Exit.CONFLICT if moved.refused else Exit.OK


async def _bridge(from_url: str, to_url: str, keep: bool, plain: bool, with_workers: bool) -> Moved:
    ledger = open_ledger(from_url)
    source, target = open_queue(patient(from_url), worker_id=NAME), open_queue(to_url)
    try:
        counts = await ledger.counts()
        workers = await _workers(ledger, counts.workers)
        if workers and not with_workers:
            raise Failed(
                Exit.CONFLICT,
                f"{workers} workers serve the old queue and could run a job that is on its "
                "way: stop them first (or say --with-workers)",
            )
        waiting = by_kind(counts).get("waiting", 0)
        with progressbar(length=waiting, label="moving", file=sys.stderr) as bar:
            way = Bridge(
                from_url, source, ledger, target, bar.update, keep=keep, waits=_wait, plain=plain
            )
            return await way.run()
    finally:
        for part in (source, target, ledger):
            await part.close()


async def _workers(ledger: Ledger, counted: int) -> int:
    """Those that could run a job; a bridge that was killed is no such worker."""
    if not isinstance(ledger, Staffed):
        return counted
    return sum(beat.worker_id != NAME for beat in await ledger.workers())


def _wait(count: int, ms: int) -> None:
    within = f"{ms / 1000:.0f} s at most"
    note(f"tenure: a bridge that was stopped holds {count} jobs; waiting for them, {within}")
