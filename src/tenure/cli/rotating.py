"""`tenure keys rotate` and `new-kek`: the keys under which stored credentials are sealed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tenure.cli.config import load_config
from tenure.cli.exits import Exit
from tenure.cli.options import json_option, queue_option
from tenure.cli.output import emit, emit_text, note
from tenure.core.errors import UsageError

if TYPE_CHECKING:
    from tenure.vault import Rotation, Vault


@click.command("new-kek")
@click.argument("kek_id", metavar="[ID]", default="")
def new_kek(kek_id: str) -> None:
    """Make a key for the ring and print its line; put it first in the file that holds the ring.

    Without an id it is named for today.
    """
    from tenure.vault import new_kek as made

    emit_text(made(kek_id or f"kek-{datetime.now(UTC):%Y-%m-%d}"))


@click.command("rotate")
@click.option("--batch", type=click.IntRange(1, 10_000), default=500, help="Rows a step (500).")
@queue_option
@json_option
def rotate(batch: int, queue_url: str | None, as_json: bool) -> int:
    """Wrap all stored credentials' keys under the ring's first key, while workers go on.

    What is encrypted stays as it is. It may be stopped and run again at any time. Give every
    gateway and worker the new ring first; take an old key away when no row is left under it.
    """
    active, done = asyncio.run(_rotate(queue_url, batch))
    if as_json:
        emit(_view(active, done))
    else:
        emit_text(f"{done.rewrapped} rewrapped under {active}")
        for kek_id, count in sorted(done.left.items()):
            if kek_id != active:
                note(f"{count} rows are still under {kek_id}: keep that key")
        if set(done.left) <= {active}:
            note("no row needs any other key: older ones may leave the ring")
    for job_id in done.unopened[:20]:
        note(f"tenure: job {job_id}: its key does not open, is the ring complete?")
    return int(Exit.PROBLEMS if done.unopened else Exit.OK)


async def _rotate(queue_url: str | None, batch: int) -> tuple[str, Rotation]:
    from tenure.cli.key_ring import open_ring
    from tenure.core.registry import open_part
    from tenure.vault import Vault
    from tenure.vault import rotate as rewrap

    config = load_config()
    vault = Vault(open_ring(config))
    url = config.text("queue_url", queue_url)
    rows = open_part(url, "credentials")
    try:
        await _seal_plain(url, vault)
        return vault.active_kek_id, await rewrap(rows, vault, batch=batch)
    finally:
        await rows.close()


async def _seal_plain(url: str, vault: Vault) -> None:
    """Webhook secrets of an older version lie open; whoever holds the ring closes them."""
    from tenure.core.registry import open_part

    try:
        secrets = open_part(url, "endpoint_secrets", vault=vault)
    except UsageError:  # a contract without webhooks
        return
    try:
        if sealed := await secrets.seal_plain():
            note(f"{sealed} webhook secrets that lay open are sealed")
    finally:
        await secrets.close()


def _view(active: str, done: Rotation) -> dict[str, Any]:
    return {
        "active": active,
        "rewrapped": done.rewrapped,
        "left": dict(done.left),
        "unopened": list(done.unopened),
    }
