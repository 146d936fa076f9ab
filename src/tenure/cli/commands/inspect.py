"""`tenure inspect`: one job in full."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from tenure.cli.options import json_option, queue_option, with_ledger
from tenure.cli.output import ago, emit, emit_text, paint, paint_state
from tenure.cli.views import event_line, event_object, job_object
from tenure.core.encoding import one_line
from tenure.core.errors import NotFound
from tenure.core.job import JobEvent, JobRecord
from tenure.core.seam import Ledger


@click.command("inspect", short_help="Show one job in full.")
@click.argument("job_id", metavar="ID")
@queue_option
@json_option
def command(job_id: str, queue_url: str | None, as_json: bool) -> None:
    """Show one job: its state, what went in, what came out, and its events.

    \b
    tenure inspect JOB_ID
    tenure inspect JOB_ID --json
    """

    async def ask(ledger: Ledger) -> tuple[JobRecord | None, list[JobEvent]]:
        return await ledger.get(job_id), await ledger.events(job_id)

    record, events = with_ledger(queue_url, ask)
    if record is None:
        raise NotFound(f"there is no job {job_id} (any more); `tenure ls` lists those there are")
    job = job_object(record)
    if as_json:
        emit(job | {"events": [event_object(event) for event in events]})
    else:
        emit_text("\n".join([*_lines(job), *(f"  {event_line(event)}" for event in events)]))


def _lines(job: dict[str, Any]) -> list[str]:
    rows = [
        ("job", job["job_id"]),
        ("queue", f"{job['contract']} {job['queue']}"),
        ("task", job["task"]),
        ("state", paint_state(job["state"])),
        ("attempt", f"{job['attempt']} of {job['max_attempts'] or 'any number'}"),
        ("worker", job["worker_id"]),
        ("created", f"{ago(job['created_ms'])} ago"),
        ("updated", f"{ago(job['updated_ms'])} ago"),
        ("payload", _pretty(job["payload"])),
        ("progress", _pretty(job["progress"])),
        ("result", _pretty(job["result"])),
        ("error", _pretty(job["error"])),
    ]
    return [f"{paint(name.ljust(9), 'dim')} {one_line(value)}" for name, value in rows if value]


def _pretty(value: Any) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()
