"""`ctx.exec`: what a handler may do with the queues of its server, by OmniQ's names.

A coroutine awaits each call; a plain handler, which runs in a thread, just calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Exec:
    """The calls of one attempt, made by the contract's `client`.

    `loop` is the client's, for handlers that run outside of it.
    """

    def __init__(
        self, client: Any, job_id: str, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._loop = loop

    def publish(self, queue: str, payload: dict[str, Any] | list[Any], **options: Any) -> Any:
        """Store a job, with the options of `Client.publish`; its id."""
        return self._do(self._client.publish(queue, payload, **options))

    def pause(self, queue: str) -> Any:
        """Hand out no more leases of a queue."""
        return self._do(self._client.pause(queue))

    def resume(self, queue: str) -> Any:
        """Hand out leases again."""
        return self._do(self._client.resume(queue))

    def is_paused(self, queue: str) -> Any:
        """Whether a queue is paused."""
        return self._do(self._client.is_paused(queue))

    def childs_init(self, key: str, expected: int) -> Any:
        """Begin to count children of a parent."""
        return self._do(self._client.childs_init(key, expected))

    def child_ack(self, key: str, child_id: str | None = None) -> Any:
        """This job, or the child named, is done; how many are left."""
        return self._do(self._client.child_ack(key, child_id or self._job_id))

    def _do(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            return call
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
