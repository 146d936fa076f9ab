"""`tenure outbox`: events to be delivered, those given up, and sending them again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from tenure.cli.config import load_config
from tenure.cli.options import json_option, queue_option
from tenure.cli.output import ago, emit, emit_text, note, table
from tenure.core.errors import NotFound, UsageError
from tenure.core.job import JobRecord
from tenure.core.registry import open_ledger, parse_url
from tenure.core.seam import Ledger, Query

Answer = TypeVar("Answer")


@click.group("outbox", short_help="List events to be delivered, and send them again.")
def command() -> None:
    """Look at the outbox of an inbox: which events wait, which were given up.

    \b
    tenure outbox ls --status dead_letter --queue inbox+sqlite:///jobs.db
    tenure outbox redeliver EVENT_ID --queue inbox+sqlite:///jobs.db
    """


@command.command("ls")
@click.option("--status", "status", help="queued, claimed, succeeded or dead_letter.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="How many (50).")
@queue_option
@json_option
def ls(status: str | None, limit: int, queue_url: str | None, as_json: bool) -> None:
    """List events, newest first."""
    states = (status,) if status else ()
    page = _with_outbox(queue_url, lambda box: box.find(Query(states=states, limit=limit)))
    if as_json:
        for event in page.jobs:
            emit(_view(event))
    elif page.jobs:
        emit_text(table(["EVENT", "STATUS", "TRIES", "TO", "SINCE"], map(_row, page.jobs)))
    else:
        note("no such events")


@command.command("redeliver")
@click.argument("event_ids", metavar="EVENT...", nargs=-1, required=True)
@queue_option
@json_option
def redeliver(event_ids: tuple[str, ...], queue_url: str | None, as_json: bool) -> None:
    """Send events again that were delivered or given up, under the same ids."""
    answers = _with_outbox(queue_url, lambda box: box.retry(event_ids))
    for event_id, answer in zip(event_ids, answers, strict=True):
        if as_json:
            emit({"event_id": event_id, "answer": answer})
        else:
            emit_text(f"{event_id} {answer}")
    if "missing" in answers:
        raise NotFound("there is no such event; `tenure outbox ls` lists those there are")


def _view(event: JobRecord) -> dict[str, Any]:
    return {
        "event_id": event.job_id,
        "job_id": event.gid,
        "status": event.state,
        "attempt": event.attempt,
        "url": event.extra.get("status_webhook_url", ""),
        "created_ms": event.created_ms,
        "updated_ms": event.updated_ms,
        "due_ms": event.due_ms,
    }


def _row(event: JobRecord) -> list[str]:
    url = str(event.extra.get("status_webhook_url", ""))
    return [event.job_id, event.state, str(event.attempt), url, ago(event.created_ms)]


def _with_outbox(queue_url: str | None, ask: Callable[[Ledger], Awaitable[Answer]]) -> Answer:
    text = load_config().text("queue_url", queue_url)
    if parse_url(text).contract != "inbox":
        raise UsageError(f"{parse_url(text).safe} has no outbox; name an inbox+... queue")
    if "box=outbox" not in text:
        text += "&box=outbox" if "?" in text else "?box=outbox"

    async def asked() -> Answer:
        ledger = open_ledger(text)
        try:
            return await ask(ledger)
        finally:
            await ledger.close()

    return asyncio.run(asked())
