"""`tenure audit`: whether the log of who did what is as it was written, and a copy of it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, BinaryIO

import click
import msgspec

from tenure.cli.config import load_config
from tenure.cli.exits import Exit
from tenure.cli.options import json_option, queue_option
from tenure.cli.output import emit, emit_text, note
from tenure.core.errors import UsageError

if TYPE_CHECKING:
    from tenure.dashboard.audit import Link

_number = click.IntRange(min=1)
_moment = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"])


@click.group("audit", short_help="Verify and export the audit log of gateways.")
def command() -> None:
    """Verify and export the log of who did what through gateways.

    It lies in the store of a gateway's first queue. Keep its head somewhere else: with it, `verify`
    also finds that the end of the log was removed.

    \b
    tenure audit verify --head HASH
    tenure audit export --since 2026-01-01 -o audit.jsonl
    tenure audit verify --file audit.jsonl
    """


@command.command("verify")
@click.option("--head", "head", default="", metavar="HASH", help="A head that was kept.")
@click.option("--file", "file", type=click.File("rb"), help="Check an export, or a part of one.")
@queue_option
@json_option
def verify(head: str, file: BinaryIO | None, queue_url: str | None, as_json: bool) -> int:
    """Name the first entry that was altered, removed or inserted, and show the head.

    Exit code 8 tells that there is one.
    """
    from tenure.dashboard.audit import linked
    from tenure.dashboard.audit import verify as verified

    try:
        links = linked(file) if file else _links(queue_url)
    except msgspec.DecodeError as error:
        raise UsageError(f"--file: a line is not one of an export: {error}") from None
    found = verified(links, head=head.strip().lower(), whole=file is None)
    if as_json:
        emit({"ok": not found.problem, **msgspec.to_builtins(found)})
    elif found.problem:
        note(f"tenure: {found.problem}")
    else:
        emit_text(f"{found.entries} entries are as they were written, {found.first} to {found.seq}")
        emit_text(f"head {found.head or 'none'}")
    if found.unchained and not as_json:
        note(f"the {found.unchained} oldest entries are from before there was a chain")
    return Exit.PROBLEMS if found.problem else Exit.OK


@command.command("export")
@click.option("--first", type=_number, default=1, help="The number of the first entry.")
@click.option("--last", type=_number, help="The number of the last entry.")
@click.option("--since", type=_moment, help="Entries from this time on, in UTC.")
@click.option("--until", type=_moment, help="Entries before this time, in UTC.")
@click.option("--output", "-o", type=click.File("wb", atomic=True), default="-", help="A file.")
@queue_option
def export(
    first: int,
    last: int | None,
    since: datetime | None,
    until: datetime | None,
    output: BinaryIO,
    queue_url: str | None,
) -> None:
    """Write the log as JSON lines, oldest first: `seq`, `prev`, `hash` and `entry`."""
    chosen = [
        link
        for link in _links(queue_url)
        if link.seq >= first
        and (last is None or link.seq <= last)
        and (since is None or link.read().ts_ms >= _ms(since))
        and (until is None or link.read().ts_ms < _ms(until))
    ]
    output.writelines(link.line for link in chosen)
    note(f"{len(chosen)} entries")


def _ms(moment: datetime) -> int:
    return int(moment.replace(tzinfo=UTC).timestamp() * 1000)


def _links(queue_url: str | None) -> list[Link]:
    from tenure.dashboard.audit import MemoryAudit, open_audit
    from tenure.gateway.keyrings import open_side_store

    async def read() -> list[Link]:
        url = load_config().text("queue_url", queue_url)
        side = open_side_store(url, "tenure-audit")
        log = open_audit(url, side)
        if isinstance(log, MemoryAudit):
            raise UsageError("the audit log of this queue lives in its process; ask its gateway")
        try:
            return [link async for link in log.links()]
        finally:
            await log.close()
            if side is not None:
                await side[0].close()

    return asyncio.run(read())
