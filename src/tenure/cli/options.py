"""Options that several commands share, and one question to the configured queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from tenure.cli.config import load_config

if TYPE_CHECKING:
    from tenure.core.seam import Ledger

Answer = TypeVar("Answer")

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
queue_option = click.option(
    "--queue", "-q", "queue_url", metavar="URL", help="The queue; default: TENURE_QUEUE_URL."
)


def with_ledger(queue_url: str | None, ask: Callable[[Ledger], Awaitable[Answer]]) -> Answer:
    """Open the ledger of this queue, or of the configured one, ask it, and close it."""
    import asyncio  # here, so that commands which ask no queue start faster

    from tenure.core.opening import open_ledger

    async def asked() -> Answer:
        ledger = open_ledger(load_config().text("queue_url", queue_url))
        try:
            return await ask(ledger)
        finally:
            await ledger.close()

    return asyncio.run(asked())
