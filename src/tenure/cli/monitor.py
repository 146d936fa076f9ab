"""The commands that look at several queues at once: workers, dead and top."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import click
import msgspec
from click.termui import progressbar

from tenure.cli.config import load_config
from tenure.cli.options import json_option
from tenure.cli.output import Exit, ago, emit, emit_text, note, paint, shown, table
from tenure.core.opening import open_journal, open_ledger, open_queue, parse_url
from tenure.core.printable import one_line
from tenure.core.redacting import Redaction
from tenure.core.seam import Journal, Ledger, Queue
from tenure.dashboard.finding import Finder
from tenure.dashboard.gathering import by_kind, dead_letters, warnings, workers
from tenure.dashboard.house import Street
from tenure.dashboard.search import Search, Term
from tenure.dashboard.shapes import DeadGroup, DeadList, WorkerView
from tenure.dashboard.watching import Watch
from tenure.dashboard.wording import duration, number, share
from tenure.worker.logs import ensure_logs


@dataclass(frozen=True, slots=True)
class OpenQueue:
    """One queue; nothing connects before it is asked something."""

    name: str
    contract: str
    queue: Queue
    ledger: Ledger
    journal: Journal
    address: str = ""
    outbox: Ledger | None = None


def chosen_urls(queue_urls: Sequence[str]) -> list[str]:
    """The queues that were named, else those of the settings."""
    config = load_config()
    return list(queue_urls) or config.texts("worker.queues") or [config.text("queue_url")]


@asynccontextmanager
async def open_queues(urls: Sequence[str]) -> AsyncIterator[Street]:
    """The queues behind these URLs, until the block ends."""
    ensure_logs()
    houses = [_opened(url, number, urls) for number, url in enumerate(urls)]
    try:
        yield Street(houses)
    finally:
        for house in houses:
            for part in (house.queue, house.ledger, house.journal):
                await part.close()


def _opened(url: str, number: int, urls: Sequence[str]) -> OpenQueue:
    parsed = parse_url(url)
    same = sum(parse_url(other).name == parsed.name for other in urls[:number])
    name = f"{parsed.name}~{same + 1}" if same else parsed.name
    parts = open_queue(url), open_ledger(url), open_journal(url)
    return OpenQueue(name, parsed.contract, *parts, address=parsed.safe)


@click.command("workers")
@click.argument("queue_urls", metavar="[URL]...", nargs=-1)
@json_option
def workers_command(queue_urls: tuple[str, ...], as_json: bool) -> None:
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
        emit_text(
            table(["WORKER", "QUEUE", "HEARD", "HOLDS", "SLOTS", "JOBS"], map(_worker_row, found))
        )
    else:
        note("no worker holds a job or was heard of; start one: tenure worker TASKS --from URL")


async def _workers(urls: list[str]) -> list[WorkerView]:
    async with open_queues(urls) as street:
        return await workers(street, Finder(street, Redaction()), Watch(street))


def _worker_row(worker: WorkerView) -> list[str]:
    jobs = ", ".join(f"{job.task} {job.job_id}" for job in worker.jobs[:3])
    more = f" and {len(worker.jobs) - 3} more" if len(worker.jobs) > 3 else ""
    heard = ago(worker.last_ms) if worker.last_ms else "-"
    slots = str(worker.slots) if worker.slots else "not told"
    return [worker.worker_id, worker.queue, heard, str(len(worker.jobs)), slots, jobs + more]


@click.command("dead")
@click.argument("queue_urls", metavar="[URL]...", nargs=-1)
@click.option("--retry", "retried", metavar="CLASS", help="Send back all that failed with this.")
@click.option("--remove", "removed", metavar="CLASS", help="Delete all that failed with this.")
@json_option
def dead_command(
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
            table(["ERROR", "QUEUE", "JOBS", "LAST", "TASKS", "WORDS"], map(_dead_row, dead.groups))
        )
    else:
        note("no job has failed for good")
    return Exit.OK


async def _dead(urls: list[str]) -> DeadList:
    async with open_queues(urls) as street:
        return await dead_letters(Finder(street, Redaction()))


async def _act(urls: list[str], verb: str, name: str, *, as_json: bool) -> int:
    search = Search("", (Term("is", ":", "failed"), Term("error", ":", name)))
    answers: Counter[str] = Counter()
    async with open_queues(urls) as street:
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


def _dead_row(group: DeadGroup) -> list[str]:
    tasks = ", ".join(group.tasks[:3])
    return [
        group.error_class,
        group.queue,
        str(group.jobs),
        ago(group.last_ms),
        tasks,
        group.message[:60],
    ]


_SPAN_S = 60
_CATCH_UP_S = 5.0
_WORKERS_SHOWN = 12
_CLEAR, _HOME, _REST = "\x1b[2J", "\x1b[H", "\x1b[0J"
_BLOCKS = " ▁▂▃▄▅▆▇█"


@click.command("top")
@click.argument("queue_urls", metavar="[URL]...", nargs=-1)
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.2), default=1.0, help="Seconds."
)
@click.option("--once", is_flag=True, help="Show it once and end.")
@json_option
def top_command(queue_urls: tuple[str, ...], interval_s: float, once: bool, as_json: bool) -> None:
    """Show depths, rates, durations and workers, again and again; Ctrl-C ends it.

    \b
    tenure top
    tenure top streams+redis://127.0.0.1:6379/0 'bullmq+redis://127.0.0.1:6379/0?queue=mail'
    """
    live = sys.stdout.isatty() and not once and not as_json
    try:
        asyncio.run(
            _top(chosen_urls(queue_urls), interval_s, once=once, live=live, as_json=as_json)
        )
    except KeyboardInterrupt:
        if live:
            emit_text("")


async def _top(
    urls: list[str], interval_s: float, *, once: bool, live: bool, as_json: bool
) -> None:
    async with open_queues(urls) as street:
        watch = Watch(street)
        finder = Finder(street, Redaction())
        watch.touch()
        try:
            if live:
                sys.stdout.write(_CLEAR)
            await watch.caught_up(within_s=_CATCH_UP_S if once else min(interval_s, 0.3))
            while True:
                await watch.look()
                seen = await _seen(street, watch, finder)
                _show(seen, live=live, as_json=as_json)
                if once:
                    return
                await asyncio.sleep(interval_s)
        finally:
            await watch.close()


async def _seen(street: Street, watch: Watch, finder: Finder) -> dict[str, Any]:
    queues = []
    for house in street:
        observer = watch.observers[house.name]
        counts = observer.counts
        figures = watch.figures(house.name, span_s=_SPAN_S)
        queues.append(
            {
                "queue": house.name,
                "away": observer.away,
                "paused": bool(counts and counts.paused),
                "workers": counts.workers if counts else 0,
                "oldest_waiting_ms": counts.oldest_waiting_ms if counts else 0,
                "kinds": by_kind(counts) if counts else {},
                "figures": figures,
                "done_per_s": [row[3] for row in watch.series(house.name, span_s=30)],
            }
        )
    found = [] if any(q["away"] for q in queues) else await workers(street, finder, watch)
    now_ms = time.time_ns() // 1_000_000
    told = [f"{warn.queue}: {warn.text}" for warn in warnings(watch, now_ms=now_ms)]
    return {"ts_ms": now_ms, "queues": queues, "workers": found, "warnings": told}


def _show(seen: dict[str, Any], *, live: bool, as_json: bool) -> None:
    if as_json:
        emit(msgspec.to_builtins(seen))
        return
    text = _text(seen)
    if live:  # over the last frame, so that nothing flickers
        sys.stdout.write(_HOME + shown(text).replace("\n", "\x1b[K\n") + "\x1b[K\n" + _REST)
        sys.stdout.flush()
    else:
        emit_text(text)


def _text(seen: dict[str, Any]) -> str:
    parts = [paint(time.strftime("tenure top  %H:%M:%S"), "bold"), ""]
    heads = [
        "QUEUE",
        "WAITING",
        "RUNNING",
        "FAILED",
        "WORKERS",
        "DONE/S",
        "ERRORS",
        "WAIT P95",
        "RUN P95",
        "OLDEST",
        "30 S",
    ]
    parts.append(table(heads, [_queue_row(queue) for queue in seen["queues"]]))
    if seen["workers"]:
        rows = [
            [w.worker_id, w.queue, f"{len(w.jobs)}/{w.slots or '?'}", _tasks(w)]
            for w in seen["workers"][:_WORKERS_SHOWN]
        ]
        parts += ["", table(["WORKER", "QUEUE", "SLOTS", "JOBS"], rows)]
    parts += ["", *(paint(f"! {one_line(text)}", "yellow") for text in seen["warnings"])]
    return "\n".join(parts).rstrip()


def _tasks(worker: WorkerView) -> str:
    return ", ".join(job.task for job in worker.jobs[:5])


def _queue_row(queue: dict[str, Any]) -> list[str]:
    kinds, figures = queue["kinds"], queue["figures"]
    name = queue["queue"] + (" (paused)" if queue["paused"] else "")
    if queue["away"]:
        return [name, paint("the store does not answer", "red"), *[""] * 9]
    return [
        name,
        number(kinds.get("waiting", 0)),
        number(kinds.get("running", 0)),
        number(kinds.get("failed", 0)),
        str(queue["workers"]),
        number(figures.done / _SPAN_S),
        share(figures.failed_share),
        duration(figures.wait_ms[1]),
        duration(figures.run_ms[1]),
        duration(queue["oldest_waiting_ms"]),
        _spark(queue["done_per_s"]),
    ]


def _spark(values: list[int]) -> str:
    """Thirty seconds as blocks.

    >>> _spark([0, 1, 2, 4])
    ' ▂▄█'
    """
    most = max(values, default=0)
    return "".join(_BLOCKS[round(value / most * 8) if most else 0] for value in values)
