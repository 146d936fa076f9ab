"""`tenure pause`: stop handing out jobs; what runs goes on."""

from __future__ import annotations

import click

from tenure.cli.config import load_config
from tenure.cli.options import json_option, queue_option, with_ledger
from tenure.cli.output import emit, emit_text
from tenure.cli.views import safe_url


@click.command("pause", short_help="Stop handing out jobs; what runs goes on.")
@queue_option
@json_option
def command(queue_url: str | None, as_json: bool) -> None:
    """Stop handing out jobs; what runs goes on.

    \b
    tenure pause --queue 'bullmq+redis://127.0.0.1:6379/0?queue=mail'
    """
    with_ledger(queue_url, lambda ledger: ledger.pause())
    url = safe_url(load_config().text("queue_url", queue_url))
    if as_json:
        emit({"queue": url, "paused": True})
    else:
        emit_text(f"{url} paused")
