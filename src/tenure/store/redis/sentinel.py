"""Which server is the primary: asked of Sentinels before every dial, and watched for a change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from tenure.core.errors import StoreError, StoreUnreachable
from tenure.store.redis.address import RedisAddress
from tenure.store.redis.connection import Dialer
from tenure.store.redis.wire import MORE, encode, place_in, reply_reader

_CONNECT_WITHIN_S = 1.0
_RECONNECT_S = 0.5
_SILENCE_S = 5.0  # then the Sentinel is asked whether it is still there
# In the order in which the Sentinel that leads a failover publishes them. The others publish the
# last one alone, and the old primary may accept writes for ten seconds more: they would be lost.
_BEGINS = b"+failover-state-send-slaveof-noone"
_EVENTS = (_BEGINS, b"+promoted-slave", b"+switch-master")
_REPLACED_WITHIN_S = 5.0  # a failover that takes longer was given up


def primary_query(service: str) -> tuple[str, ...]:
    """The command that asks a Sentinel for the primary of a service; it may answer None."""
    return ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)


def primary_in(reply: Any) -> tuple[str, int]:
    """Host and port in the answer to `primary_query`; raises one of `UNREADABLE`."""
    return place_in(*reply)


class Sentinels:
    """Asks Sentinels for the primary of a service, and watches all of them for another one."""

    def __init__(self, address: RedisAddress, dialer: Dialer) -> None:
        self._address = address
        self._dialer = dialer
        self._sentinels = address.servers()  # the one with the latest news first
        self._leaving: tuple[str, int] | None = None
        self._leaving_until = 0.0

    async def locate(self) -> RedisAddress:
        """The address of the primary, by the first Sentinel that answers."""
        query = primary_query(self._address.service)
        try:
            sentinel, primary = await self._dialer.ask_first(
                tuple(self._sentinels), query, lambda _, reply: primary_in(reply)
            )
        except StoreUnreachable as error:
            raise StoreUnreachable(f"{self._address.label}: no Sentinel answers: {error}") from None
        self._prefer(sentinel)
        found = self._address.node(*primary)
        now = asyncio.get_running_loop().time()
        if (found.host, found.port) == self._leaving and now < self._leaving_until:
            raise StoreUnreachable(f"{found.label}: the Sentinels are replacing this primary")
        return found

    async def watch(self, changed: Callable[[RedisAddress | None], None]) -> None:
        """Report the primary when it may be another one, None when it is about to be replaced.

        Runs until cancelled.
        """
        await asyncio.gather(*(self._watch(each, changed) for each in tuple(self._sentinels)))

    async def _watch(
        self, sentinel: RedisAddress, changed: Callable[[RedisAddress | None], None]
    ) -> None:
        while True:
            with contextlib.suppress(Exception):  # the watch goes on, whatever a Sentinel sends
                async with contextlib.aclosing(self._events(sentinel)) as events:
                    async for kind, channel, text in events:
                        if kind == b"message":
                            words = text.decode(errors="replace").split()
                            if self._address.service not in words:
                                continue
                            self._prefer(sentinel)
                            if channel == _BEGINS:
                                self._leave(words)
                                changed(None)
                                continue
                        changed(await self.locate())
            await asyncio.sleep(_RECONNECT_S)

    def _leave(self, words: list[str]) -> None:
        """`slave <name> <ip> <port> @ <service> <ip> <port>`: the last two are the old primary."""
        self._leaving = (words[-2], int(words[-1]))
        self._leaving_until = asyncio.get_running_loop().time() + _REPLACED_WITHIN_S

    def _prefer(self, sentinel: RedisAddress) -> None:
        self._sentinels.remove(sentinel)
        self._sentinels.insert(0, sentinel)

    async def _events(self, sentinel: RedisAddress) -> AsyncGenerator[list[Any]]:
        """The beginning of the subscription, because events were missed before, and each event."""
        async with asyncio.timeout(_CONNECT_WITHIN_S):
            reader, writer = await asyncio.open_connection(
                sentinel.host, sentinel.port, ssl=sentinel.tls_context()
            )
        try:
            greeting = sentinel.greeting("tenure-watch", sentinel.login())
            writer.write(b"".join(map(encode, [*greeting, ("SUBSCRIBE", *_EVENTS)])))
            parser = reply_reader()
            while True:
                reply = parser.gets()
                if reply is MORE:
                    data = await _read(reader, writer)
                    if not data:
                        return
                    parser.feed(data)
                elif isinstance(reply, StoreError):
                    raise reply
                elif isinstance(reply, list) and (
                    reply[0] == b"message" or reply[:2] == [b"subscribe", _EVENTS[-1]]
                ):
                    yield reply
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The next bytes; after a silence it asks, and then something must come."""
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await reader.read(1 << 16)
    except TimeoutError:
        writer.write(encode(("PING",)))
    async with asyncio.timeout(_SILENCE_S):
        return await reader.read(1 << 16)
