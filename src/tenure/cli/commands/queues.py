"""`tenure queues`: how many jobs are in which state."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import msgspec

from tenure.cli.config import load_config
from tenure.cli.options import json_option
from tenure.cli.output import emit, emit_text, paint, table
from tenure.cli.views import safe_url
from tenure.core.registry import open_ledger
from tenure.core.seam import Counts


@click.command("queues", short_help="Show how many jobs are in which state.")
@click.argument("queue_urls", metavar="[URL]...", nargs=-1)
@json_option
def command(queue_urls: tuple[str, ...], as_json: bool) -> None:
    """Show depth, totals, workers and the oldest waiting job of each queue.

    \b
    tenure queues
    tenure queues 'inbox+sqlite:///jobs.db' --json
    """
    urls = list(queue_urls) or load_config().queue_urls()
    for url, counts in asyncio.run(_counts(urls)):
        view: dict[str, Any] = {"queue": safe_url(url), **msgspec.to_builtins(counts)}
        if as_json:
            emit(view)
        else:
            emit_text(_text(view))


async def _counts(urls: list[str]) -> list[tuple[str, Counts]]:
    found = []
    for url in urls:
        ledger = open_ledger(url)
        try:
            found.append((url, await ledger.counts()))
        finally:
            await ledger.close()
    return found


def _text(view: dict[str, Any]) -> str:
    facts = [f"{view['workers']} worker{'s' * (view['workers'] != 1)}"] + (
        ["paused"] if view["paused"] else []
    )
    if view["oldest_waiting_ms"]:
        facts.append(f"oldest waits {view['oldest_waiting_ms'] / 1000:.1f} s")
    names = list(dict.fromkeys([*view["states"], *view["totals"]]))
    rows = [[n, str(view["states"].get(n, "-")), str(view["totals"].get(n, "-"))] for n in names]
    return "\n".join(
        [paint(view["queue"], "bold"), ", ".join(facts), table(["", "NOW", "EVER"], rows)]
    )
