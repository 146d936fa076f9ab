"""`tenure resume`: hand out jobs again."""

from __future__ import annotations

import click

from tenure.cli.config import load_config
from tenure.cli.options import json_option, queue_option, with_ledger
from tenure.cli.output import emit, emit_text
from tenure.cli.views import safe_url


@click.command("resume", short_help="Hand out jobs again.")
@queue_option
@json_option
def command(queue_url: str | None, as_json: bool) -> None:
    """Hand out jobs again.

    \b
    tenure resume --queue 'bullmq+redis://127.0.0.1:6379/0?queue=mail'
    """
    with_ledger(queue_url, lambda ledger: ledger.resume())
    url = safe_url(load_config().text("queue_url", queue_url))
    if as_json:
        emit({"queue": url, "paused": False})
    else:
        emit_text(f"{url} resumed")
