"""A small pool of daemon threads.

Not `concurrent.futures`: that one joins its threads when the interpreter ends, so one handler that
never returns would keep a stopped worker alive for ever.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

_Call = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]


class Threads:
    """At most `limit` calls at once; further ones wait in order."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._count = 0
        self._busy = 0  # calls handed in and not yet back: only the loop's thread counts

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run it in a thread; returns what it returns, raises what it raises.

        If the caller is cancelled the thread goes on: nothing can stop it.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._busy += 1
        done.add_done_callback(self._back)
        if self._busy > self._count and self._count < self.limit:
            self._count += 1
            name = f"tenure-handler-{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._calls.put((function, done, loop))
        return await done

    def close(self) -> None:
        """Idle threads end; busy ones end after their call."""
        for _ in range(self._count):
            self._calls.put(None)

    def _back(self, _: asyncio.Future[Any]) -> None:
        self._busy -= 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, done, loop = call
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(_deliver, done, value, error)
            except RuntimeError:
                return  # the loop is closed: the worker has stopped without us
            del call, function, done, value, error


def _deliver(done: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(value)
    elif isinstance(error, StopIteration):  # a future cannot carry it
        done.set_exception(RuntimeError(f"the handler raised {error!r}"))
    else:
        done.set_exception(error)
