"""Threads for plain handlers that nobody waits for at exit.

A pool of the standard library is joined when the interpreter ends; a consumer that was told to go
at once must not stay for a handler whose job it has handed back.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

_Call: TypeAlias = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Threads:
    """At most `most` daemon threads, started when first needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._started = 0
        self._busy = 0

    async def run(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """The function's value; its exception is raised here."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()
        self._busy += 1
        if self._busy > self._started and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._work, args=(loop,), daemon=True).start()
        self._calls.put((lambda: context.run(function, argument), future))
        try:
            return await future
        finally:
            self._busy -= 1

    def close(self) -> None:
        """Let the threads end when they are free."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:  # told to the waiter, whatever it is
                error = raised
            try:
                loop.call_soon_threadsafe(_tell, future, value, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return


def _tell(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(_Raised(error))


class _Raised(Exception):
    """Carries what a handler raised: a future takes no StopIteration, and an exit would end us."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def raised_by(error: BaseException) -> BaseException:
    """What the handler itself raised."""
    return error.error if isinstance(error, _Raised) else error
