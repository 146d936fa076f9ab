"""Tokens as events: gathered, so that a fast model writes at most about twenty events a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

INTERVAL_S = 0.05


class TokenFeed:
    """Sends what was added since the last event, at once when idle, else after `INTERVAL_S`.

    Leaving the block sends the rest. An error of `send` comes out of `add` or of the block.
    """

    def __init__(
        self, send: Callable[[str], Awaitable[None]], interval_s: float = INTERVAL_S
    ) -> None:
        self._send = send
        self._interval_s = interval_s
        self._waiting: list[str] = []
        self._added = asyncio.Event()
        self._closing = asyncio.Event()

    async def __aenter__(self) -> TokenFeed:
        self._sender = asyncio.create_task(self._run())
        return self

    def add(self, text: str) -> None:
        """Text to be sent soon."""
        if self._sender.done():
            self._sender.result()
        self._waiting.append(text)
        self._added.set()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
            return
        self._closing.set()
        self._added.set()
        await self._sender

    async def _run(self) -> None:
        while True:
            await self._added.wait()
            self._added.clear()
            text = "".join(self._waiting)
            self._waiting.clear()
            if text:
                await self._send(text)
            if self._closing.is_set():
                if not self._waiting:
                    return
                continue
            try:
                await asyncio.wait_for(self._closing.wait(), self._interval_s)
            except TimeoutError:
                continue
