"""The contract's client for programs without an event loop.

    with SyncClient("redis://localhost:6379/0") as client:
        client.publish(queue="emails", payload={"to": "ada"})

It has every call of `Client`, which runs in an event loop in a thread of its own; threads may
share one `SyncClient`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from tenure.contracts.omniq.client import Client
from tenure.contracts.omniq.context import Handler


class _Blocking:
    """An object whose coroutine functions are called and answer."""

    def __init__(self, target: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._target = target
        self._run = run

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @functools.wraps(found)
        def call(*args: Any, **options: Any) -> Any:
            return self._run(found(*args, **options))

        return call


class SyncClient(_Blocking):
    """`Client` without `await`; arguments and answers are the same."""

    def __init__(self, redis_url: str = "redis://localhost:6379/0", *, worker_id: str = "") -> None:
        self._open = functools.partial(Client, redis_url, worker_id=worker_id)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="omniq", daemon=True)
        self._thread.start()
        super().__init__(self._open(), self._in_loop)
        self.monitor = _Blocking(self._target.monitor, self._in_loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def consume(self, queue: str, handler: Handler, **settings: Any) -> None:
        """Run `handler(ctx)` for every job in this thread until a signal ends it."""

        async def serve() -> None:
            async with self._open() as client:
                await client.consume(queue, handler, **settings)

        asyncio.run(serve())

    def close(self) -> None:
        """Let go of the connections, and end the thread."""
        if self._thread.is_alive():
            self._in_loop(self._target.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _in_loop(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
