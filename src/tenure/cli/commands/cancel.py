"""`tenure cancel`: end jobs: waiting ones now, running ones through their worker."""

from __future__ import annotations

import click

from tenure.cli.options import ids_argument, json_option, queue_option, steer


@click.command(
    "cancel", short_help="End jobs: waiting ones now, running ones through their worker."
)
@ids_argument
@queue_option
@json_option
def command(job_ids: tuple[str, ...], queue_url: str | None, as_json: bool) -> int:
    """End waiting jobs at once and running ones through their worker.

    \b
    tenure cancel JOB_ID
    tenure cancel ID ID ID --json
    """
    return steer(
        queue_url,
        job_ids,
        lambda ledger, ids: ledger.cancel(ids),
        done="canceled",
        as_json=as_json,
    )
