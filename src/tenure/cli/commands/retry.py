"""`tenure retry`: send finished jobs back to their queue."""

from __future__ import annotations

import click

from tenure.cli.options import ids_argument, json_option, queue_option, steer


@click.command("retry", short_help="Send finished jobs back to their queue.")
@ids_argument
@queue_option
@json_option
def command(job_ids: tuple[str, ...], queue_url: str | None, as_json: bool) -> int:
    """Send finished jobs back to their queue; a job that has not ended is a conflict.

    \b
    tenure retry JOB_ID
    """
    return steer(
        queue_url,
        job_ids,
        lambda ledger, ids: ledger.retry(ids),
        done="queued again",
        as_json=as_json,
    )
