"""The commands for several queues at once: workers, dead and top."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import click
from click.termui import progressbar

from tenure.cli.config import load_config
from tenure.cli.console import (
    Exit,
    ago,
    answer,
    answer_rows,
    emit,
    emit_text,
    json_option,
    paint,
    queues_option,
    shown,
    table,
)
from tenure.core.encoding import one_line
from tenure.core.redaction import Redaction
from tenure.core.registry import open_journal, open_ledger, open_queue, parse_url, unique_names
from tenure.dashboard.display import duration, number, share
from tenure.dashboard.finder import JobFinder
from tenure.dashboard.queues import OpenQueue, QueueRegistry
from tenure.dashboard.search import Search, Term
from tenure.dashboard.views import (
    DeadGroup,
    DeadList,
    WorkerView,
    dead_letters,
    warnings,
    workers,
)
from tenure.dashboard.watch import JournalWatch
from tenure.worker.telemetry import ensure_logs


def _chosen_urls(queue_urls: tuple[str, ...]) -> list[str]:
    """The given queues, else the configured ones."""
    config = load_config()
    return config.texts("worker.queues", queue_urls) or [config.text("queue_url")]


@asynccontextmanager
async def open_queues(urls: Sequence[str]) -> AsyncIterator[QueueRegistry]:
    """Open the queues of these URLs for the block."""
    ensure_logs()
    names = unique_names([parse_url(url).name for url in urls])
    opened = [_open(url, name) for url, name in zip(urls, names, strict=True)]
    try:
        yield QueueRegistry(opened)
    finally:
        for each in opened:
            await each.close()


def _open(url: str, name: str) -> OpenQueue:
    parsed = parse_url(url)
    opened = open_queue(url), open_ledger(url), open_journal(url)
    return OpenQueue(name, parsed.contract, *opened, address=parsed.safe)


@click.command("workers")
@queues_option
@json_option
def workers_command(queue_urls: tuple[str, ...], as_json: bool) -> None:
    """Show the workers of queues: the last heartbeat, the jobs and the slots of each.

    The queues of one worker share its slots. Workers of other programs do not report slots.

    \b
    tenure workers
    tenure workers --queue streams+redis://127.0.0.1:6379/0 --json
    """
    found = asyncio.run(_workers(_chosen_urls(queue_urls)))
    headers = ["WORKER", "QUEUE", "HEARD", "HOLDS", "SLOTS", "JOBS"]
    none = "no workers; start one: tenure worker TASKS --queue URL"
    answer_rows(as_json, found, headers, _worker_row, none)


async def _workers(urls: list[str]) -> list[WorkerView]:
    async with open_queues(urls) as queues:
        return await workers(queues, JobFinder(queues, Redaction()), JournalWatch(queues))


def _worker_row(worker: WorkerView) -> list[str]:
    jobs = ", ".join(f"{job.task} {job.job_id}" for job in worker.jobs[:3])
    more = f" and {len(worker.jobs) - 3} more" if len(worker.jobs) > 3 else ""
    heard = ago(worker.last_ms) if worker.last_ms else "-"
    slots = str(worker.slots) if worker.slots else "unknown"
    return [worker.worker_id, worker.queue, heard, str(len(worker.jobs)), slots, jobs + more]


@click.command("dead")
@queues_option
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
        raise click.UsageError("--retry and --remove exclude each other: choose one")
    urls = _chosen_urls(queue_urls)
    if retried or removed:
        verb = "retry" if retried else "remove"
        return asyncio.run(_act(urls, verb, retried or removed or "", as_json=as_json))
    dead = asyncio.run(_dead(urls))
    headers = ["ERROR", "QUEUE", "JOBS", "LAST", "TASKS", "MESSAGE"]
    answer_rows(as_json, dead.groups, headers, _dead_row, "no job has failed for good")
    return Exit.OK


async def _dead(urls: list[str]) -> DeadList:
    async with open_queues(urls) as queues:
        return await dead_letters(JobFinder(queues, Redaction()))


async def _act(urls: list[str], verb: str, name: str, *, as_json: bool) -> int:
    search = Search("", (Term("is", ":", "failed"), Term("error", ":", name)))
    answers: Counter[str] = Counter()
    async with open_queues(urls) as queues:
        finder = JobFinder(queues, Redaction())
        total = (await finder.count(search)).jobs
        with progressbar(length=total, label=verb, file=sys.stderr) as bar:
            async for jobs in finder.each(search, step=200):
                by_queue: dict[str, list[str]] = {}
                for found in jobs:
                    by_queue.setdefault(found.queue, []).append(found.job.job_id)
                for queue, job_ids in by_queue.items():
                    answers.update(await getattr(queues[queue].ledger, verb)(job_ids))
                bar.update(len(jobs))
    done = {"action": verb, "error": name, "answers": dict(answers)}
    answer(as_json, done, f"{answers['ok']} of {total} jobs: {verb} done")
    return Exit.OK if answers["ok"] == total else Exit.CONFLICT


def _dead_row(group: DeadGroup) -> list[str]:
    facts = [group.error_class, group.queue, str(group.jobs), ago(group.last_ms)]
    return [*facts, ", ".join(group.tasks[:3]), group.message[:60]]


_SPAN_S = 60
_CATCH_UP_S = 5.0
_WORKERS_SHOWN = 12
_TOP_HEADERS = ["QUEUE", "WAITING", "RUNNING", "FAILED", "WORKERS", "DONE/S", "ERRORS"]
_TOP_HEADERS += ["WAIT P95", "RUN P95", "OLDEST", "30 S"]
_CLEAR, _HOME, _REST = "\x1b[2J", "\x1b[H", "\x1b[0J"
_BLOCKS = " ▁▂▃▄▅▆▇█"


@click.command("top")
@queues_option
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.2), default=1.0, help="Seconds."
)
@click.option("--once", is_flag=True, help="Show it once and end.")
@json_option
def top_command(queue_urls: tuple[str, ...], interval_s: float, once: bool, as_json: bool) -> None:
    """Show depths, rates, durations and workers, again and again; Ctrl-C ends it.

    \b
    tenure top
    tenure top -q streams+redis://127.0.0.1:6379/0 -q 'bullmq+redis://127.0.0.1:6379/0?queue=mail'
    """
    live = sys.stdout.isatty() and not once and not as_json
    try:
        asyncio.run(
            _top(_chosen_urls(queue_urls), interval_s, once=once, live=live, as_json=as_json)
        )
    except KeyboardInterrupt:
        if live:
            emit_text("")


async def _top(
    urls: list[str], interval_s: float, *, once: bool, live: bool, as_json: bool
) -> None:
    async with open_queues(urls) as queues:
        watch = JournalWatch(queues)
        finder = JobFinder(queues, Redaction())
        watch.touch()
        try:
            if live:
                sys.stdout.write(_CLEAR)
            await watch.wait_caught_up(within_s=_CATCH_UP_S if once else min(interval_s, 0.3))
            while True:
                await watch.sample()
                _show(await _frame(queues, watch, finder), live=live, as_json=as_json)
                if once:
                    return
                await asyncio.sleep(interval_s)
        finally:
            await watch.close()


async def _frame(queues: QueueRegistry, watch: JournalWatch, finder: JobFinder) -> dict[str, Any]:
    rows = [_queue_figures(queue.name, watch) for queue in queues]
    found = [] if any(row["away"] for row in rows) else await workers(queues, finder, watch)
    now_ms = time.time_ns() // 1_000_000
    texts = [f"{warning.queue}: {warning.text}" for warning in warnings(watch, now_ms=now_ms)]
    return {"ts_ms": now_ms, "queues": rows, "workers": found, "warnings": texts}


def _queue_figures(name: str, watch: JournalWatch) -> dict[str, Any]:
    observer = watch.observers[name]
    counts = observer.counts
    return {
        "queue": name,
        "away": observer.away,
        "paused": bool(counts and counts.paused),
        "workers": counts.workers if counts else 0,
        "oldest_waiting_ms": counts.oldest_waiting_ms if counts else 0,
        "states": observer.depth_by_state,
        "figures": watch.figures(name, span_s=_SPAN_S),
        "done_per_s": [row[3] for row in watch.series(name, span_s=30)],
    }


def _show(frame: dict[str, Any], *, live: bool, as_json: bool) -> None:
    if as_json:
        emit(frame)
        return
    text = _frame_text(frame)
    if live:  # overwrite the last frame, which avoids flicker
        sys.stdout.write(_HOME + shown(text).replace("\n", "\x1b[K\n") + "\x1b[K\n" + _REST)
        sys.stdout.flush()
    else:
        emit_text(text)


def _frame_text(frame: dict[str, Any]) -> str:
    parts = [paint(time.strftime("tenure top  %H:%M:%S"), "bold"), ""]
    parts.append(table(_TOP_HEADERS, [_queue_row(queue) for queue in frame["queues"]]))
    if frame["workers"]:
        rows = []
        for worker in frame["workers"][:_WORKERS_SHOWN]:
            slots = f"{len(worker.jobs)}/{worker.slots or '?'}"
            tasks = ", ".join(job.task for job in worker.jobs[:5])
            rows.append([worker.worker_id, worker.queue, slots, tasks])
        parts += ["", table(["WORKER", "QUEUE", "SLOTS", "JOBS"], rows)]
    parts += ["", *(paint(f"! {one_line(text)}", "yellow") for text in frame["warnings"])]
    return "\n".join(parts).rstrip()


def _queue_row(queue: dict[str, Any]) -> list[str]:
    states, figures = queue["states"], queue["figures"]
    name = queue["queue"] + (" (paused)" if queue["paused"] else "")
    if queue["away"]:
        return [name, paint("the store does not answer", "red"), *[""] * 9]
    return [
        name,
        number(states["waiting"]),
        number(states["running"]),
        number(states["failed"]),
        str(queue["workers"]),
        number(figures.done / _SPAN_S),
        share(figures.failed_share),
        duration(figures.wait_ms[1]),
        duration(figures.run_ms[1]),
        duration(queue["oldest_waiting_ms"]),
        _spark(queue["done_per_s"]),
    ]


def _spark(values: list[int]) -> str:
    """Thirty seconds as a line of blocks.

    >>> _spark([0, 1, 2, 4])
    ' ▂▄█'
    """
    most = max(values, default=0)
    return "".join(_BLOCKS[round(value / most * 8) if most else 0] for value in values)
