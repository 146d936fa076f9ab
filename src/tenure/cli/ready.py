"""Waits for a gateway that a supervisor has started to answer."""

from __future__ import annotations

import asyncio
import http.client
import time
from urllib.parse import urlsplit

from tenure.cli.exits import Exit, Failed
from tenure.cli.supervise import Supervisor

_READY_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.05


async def until_ready(gateway_url: str, supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Return when it answers or `stop` is set; raises when a part cannot start, or in the end."""
    deadline = time.monotonic() + _READY_WITHIN_S
    while not stop.is_set():
        if supervisor.broken.done():
            supervisor.broken.result()
        if await asyncio.to_thread(_answers, gateway_url):
            return
        if time.monotonic() > deadline:
            raise Failed(
                Exit.TIMEOUT,
                f"the gateway did not answer within {_READY_WITHIN_S:g} s; its words are above",
            )
        await asyncio.sleep(_LOOK_EVERY_S)


def _answers(gateway_url: str) -> bool:
    parts = urlsplit(gateway_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=2)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
