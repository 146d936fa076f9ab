"""`tenure ls`: list jobs, newest first."""

from __future__ import annotations

import click

from tenure.cli.options import json_option, queue_option, with_ledger
from tenure.cli.output import emit, emit_text, note, table
from tenure.cli.views import job_object, job_row
from tenure.core.seam import Query


@click.command("ls", short_help="List jobs, newest first.")
@click.argument("url", metavar="[URL]", required=False)
@click.option("--state", "states", multiple=True, help="Only this state; may be given again.")
@click.option("--task", default="", help="Only this task.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@click.option("--after", default="", metavar="CURSOR", help="Go on where the last page ended.")
@queue_option
@json_option
def command(
    url: str | None,
    states: tuple[str, ...],
    task: str,
    limit: int,
    after: str,
    queue_url: str | None,
    as_json: bool,
) -> None:
    """List jobs, newest first; with --json one object a line.

    \b
    tenure ls --state error --limit 20
    tenure ls 'bullmq+redis://127.0.0.1:6379/0?queue=mail' --task chat --json
    """
    query = Query(states=states, task=task, limit=limit, after=after)
    page = with_ledger(url or queue_url, lambda ledger: ledger.find(query))
    jobs = [job_object(record) for record in page.jobs]
    if as_json:
        for job in jobs:
            emit(job)
    elif jobs:
        emit_text(table(["ID", "TASK", "STATE", "ATTEMPT", "AGE", "ERROR"], map(job_row, jobs)))
    else:
        note("no jobs" + (" like that" if states or task or after else " yet"))
    if page.after:
        note(f"more: --after {page.after}")
