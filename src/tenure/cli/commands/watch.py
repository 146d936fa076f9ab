"""`tenure watch`: follow a job's events until it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from tenure.cli.asking import Side, open_side, wait_for_end
from tenure.cli.config import load_config
from tenure.cli.exits import Exit
from tenure.cli.options import checked_timeout, gateway_option, json_option, queue_option
from tenure.cli.output import emit, emit_text
from tenure.cli.views import event_line, event_object, is_success


@click.command("watch", short_help="Follow a job's events until it ends.")
@click.argument("job_id", metavar="ID")
@queue_option
@gateway_option
@click.option(
    "--timeout", "timeout_s", type=float, callback=checked_timeout, help="Seconds to wait."
)
@json_option
def command(
    job_id: str,
    queue_url: str | None,
    gateway_url: str | None,
    timeout_s: float | None,
    as_json: bool,
) -> int:
    """Print a job's events from the first to the last; exit code 6 if the job failed.

    \b
    tenure watch JOB_ID
    tenure watch JOB_ID --json | grep '"progress"'
    """
    config = load_config()
    gateway = config.text("gateway_url", gateway_url) if queue_url is None else gateway_url or ""
    side = open_side(config.text("queue_url", queue_url), gateway, config.text("api_key"))
    ended = asyncio.run(_watch(side, job_id, timeout_s, as_json))
    return Exit.OK if is_success(ended["state"]) else Exit.JOB_FAILED


async def _watch(side: Side, job_id: str, timeout_s: float | None, as_json: bool) -> dict[str, Any]:
    def show(event: Any) -> None:
        if as_json:
            emit(event_object(event))
        else:
            emit_text(event_line(event))

    try:
        return await wait_for_end(side, job_id, timeout_s, show)
    finally:
        await side.close()
