"""`tenure remove`: delete jobs that nobody runs."""

from __future__ import annotations

import click

from tenure.cli.options import ids_argument, json_option, queue_option, steer


@click.command("remove", short_help="Delete jobs that nobody runs.")
@ids_argument
@queue_option
@json_option
def command(job_ids: tuple[str, ...], queue_url: str | None, as_json: bool) -> int:
    """Delete jobs that nobody runs, with their events and results.

    \b
    tenure remove JOB_ID
    """
    return steer(
        queue_url, job_ids, lambda ledger, ids: ledger.remove(ids), done="removed", as_json=as_json
    )
