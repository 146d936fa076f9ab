"""Signals for a program with children: the first stops in good order, the second at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopping_on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """Within the block SIGINT, SIGTERM and SIGHUP set `stop`, and then `hurry`."""
    loop = asyncio.get_running_loop()

    def press() -> None:
        (hurry if stop.is_set() else stop).set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, press)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
