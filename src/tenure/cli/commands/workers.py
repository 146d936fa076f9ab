"""`tenure workers`: who works, and on what."""

from __future__ import annotations

import asyncio

import click
import msgspec

from tenure.cli.houses import chosen_urls, open_street
from tenure.cli.options import json_option
from tenure.cli.output import ago, emit, emit_text, note, table
from tenure.core.redaction import Redaction
from tenure.dashboard.finding import Finder
from tenure.dashboard.gathering import workers
from tenure.dashboard.shapes import WorkerView
from tenure.dashboard.watching import Watch


@click.command("workers", short_help="Show who works, and on what.")
@click.argument("queue_urls", metavar="[URL]...", nargs=-1)
@json_option
def command(queue_urls: tuple[str, ...], as_json: bool) -> None:
    """Show the workers of queues: when each was last heard of, the jobs it holds, and its
    slots, which the queues of one worker share. Workers of other makes do not tell theirs.

    \b
    tenure workers
    tenure workers streams+redis://127.0.0.1:6379/0 --json
    """
    found = asyncio.run(_workers(chosen_urls(queue_urls)))
    if as_json:
        for worker in found:
            emit(msgspec.to_builtins(worker))
    elif found:
        emit_text(table(["WORKER", "QUEUE", "HEARD", "HOLDS", "SLOTS", "JOBS"], map(_row, found)))
    else:
        note("no worker holds a job or was heard of; start one: tenure worker TASKS --from URL")


async def _workers(urls: list[str]) -> list[WorkerView]:
    async with open_street(urls) as street:
        return await workers(street, Finder(street, Redaction()), Watch(street))


def _row(worker: WorkerView) -> list[str]:
    jobs = ", ".join(f"{job.task} {job.job_id}" for job in worker.jobs[:3])
    more = f" and {len(worker.jobs) - 3} more" if len(worker.jobs) > 3 else ""
    heard = ago(worker.last_ms) if worker.last_ms else "-"
    slots = str(worker.slots) if worker.slots else "not told"
    return [worker.worker_id, worker.queue, heard, str(len(worker.jobs)), slots, jobs + more]
