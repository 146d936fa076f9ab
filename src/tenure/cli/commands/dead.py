"""`tenure dead`: failed jobs by error class, and what to do about a whole class."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

import click
import msgspec
from click.termui import progressbar

from tenure.cli.exits import Exit
from tenure.cli.houses import chosen_urls, open_street
from tenure.cli.options import json_option
from tenure.cli.output import ago, emit, emit_text, note, table
from tenure.core.redaction import Redaction
from tenure.dashboard.finding import Finder
from tenure.dashboard.gathering import dead_letters
from tenure.dashboard.house import Street
from tenure.dashboard.search import Search, Term
from tenure.dashboard.shapes import DeadGroup, DeadList


@click.command("dead", short_help="Show failed jobs by error class, retry or remove a class.")
@click.argument("queue_urls", metavar="[URL]...", nargs=-1)
@click.option("--retry", "retried", metavar="CLASS", help="Send back all that failed with this.")
@click.option("--remove", "removed", metavar="CLASS", help="Delete all that failed with this.")
@json_option
def command(
    queue_urls: tuple[str, ...], retried: str | None, removed: str | None, as_json: bool
) -> int:
    """Group failed jobs by the class of their error; act on a class in bounded batches.

    \b
    tenure dead
    tenure dead --retry ConnectionError
    """
    if retried and removed:
        raise click.UsageError("--retry and --remove are two wishes: choose one")
    urls = chosen_urls(queue_urls)
    if retried or removed:
        verb = "retry" if retried else "remove"
        return asyncio.run(_act(urls, verb, retried or removed or "", as_json=as_json))
    dead = asyncio.run(_dead(urls))
    if as_json:
        for group in dead.groups:
            emit(msgspec.to_builtins(group))
    elif dead.groups:
        emit_text(
            table(["ERROR", "QUEUE", "JOBS", "LAST", "TASKS", "WORDS"], map(_row, dead.groups))
        )
    else:
        note("no job has failed for good")
    return Exit.OK


async def _dead(urls: list[str]) -> DeadList:
    async with open_street(urls) as street:
        return await dead_letters(Finder(street, Redaction()))


async def _act(urls: list[str], verb: str, name: str, *, as_json: bool) -> int:
    search = Search("", (Term("is", ":", "failed"), Term("error", ":", name)))
    answers: Counter[str] = Counter()
    async with open_street(urls) as street:
        finder = Finder(street, Redaction())
        total = (await finder.count(search)).jobs
        with progressbar(length=total, label=verb, file=sys.stderr) as bar:
            async for jobs in finder.each(search, step=200):
                for queue, job_ids in _by_queue(jobs).items():
                    answers.update(await _steer(street, verb, queue, job_ids))
                bar.update(len(jobs))
    if as_json:
        emit({"action": verb, "error": name, "answers": dict(answers)})
    else:
        emit_text(f"{answers['ok']} of {total} jobs: {verb} done")
    return Exit.OK if answers["ok"] == total else Exit.CONFLICT


def _by_queue(jobs: list[Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in jobs:
        found.setdefault(each.queue, []).append(each.job.job_id)
    return found


async def _steer(street: Street, verb: str, queue: str, job_ids: list[str]) -> list[str]:
    ledger = street[queue].ledger
    return await (ledger.retry(job_ids) if verb == "retry" else ledger.remove(job_ids))


def _row(group: DeadGroup) -> list[str]:
    tasks = ", ".join(group.tasks[:3])
    return [
        group.error_class,
        group.queue,
        str(group.jobs),
        ago(group.last_ms),
        tasks,
        group.message[:60],
    ]
