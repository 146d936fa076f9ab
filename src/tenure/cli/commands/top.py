"""`tenure top`: a live view of queues and workers in the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import click
import msgspec

from tenure.cli.houses import chosen_urls, open_street
from tenure.cli.options import json_option
from tenure.cli.output import emit, emit_text, paint, shown, table
from tenure.core.encoding import one_line
from tenure.core.redaction import Redaction
from tenure.dashboard.finding import Finder
from tenure.dashboard.gathering import by_kind, warnings, workers
from tenure.dashboard.house import Street
from tenure.dashboard.shapes import WorkerView
from tenure.dashboard.watching import Watch
from tenure.dashboard.wording import duration, number, share

_SPAN_S = 60
_CATCH_UP_S = 5.0
_WORKERS_SHOWN = 12
_CLEAR, _HOME, _REST = "\x1b[2J", "\x1b[H", "\x1b[0J"
_BLOCKS = " ▁▂▃▄▅▆▇█"


@click.command("top", short_help="Watch queues and workers in the terminal.")
@click.argument("queue_urls", metavar="[URL]...", nargs=-1)
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.2), default=1.0, help="Seconds."
)
@click.option("--once", is_flag=True, help="Show it once and end.")
@json_option
def command(queue_urls: tuple[str, ...], interval_s: float, once: bool, as_json: bool) -> None:
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
    async with open_street(urls) as street:
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
