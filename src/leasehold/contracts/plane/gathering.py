"""Group commit: what arrives while a call is on its way travels together with the next one.

Alone, a request leaves at once. Under load many requests share one transaction, which costs the
database hardly more than one of them; each still gets its own answer. A second call goes beside the
first only with a load of its own: several small ones would cost more than they save.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")

LOAD = 100


class _Waiting(NamedTuple, Generic[T, R]):
    items: Sequence[T]
    weight: int
    answer: asyncio.Future[list[R]]


class Gathering(Generic[T, R]):
    """`send` answers items in their order; at most `calls_max` calls are under way at a time.

    `weigh` says how much an item asks for; what weighs `LOAD` is worth a call beside others.
    """

    def __init__(
        self,
        send: Callable[[list[T]], Awaitable[list[R]]],
        *,
        items_max: int,
        calls_max: int,
        weigh: Callable[[T], int] | None = None,
    ) -> None:
        self._send = send
        self._items_max = items_max
        self._calls_max = calls_max
        self._weigh = weigh
        self._weight = 0
        self._waiting: deque[_Waiting[T, R]] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(self, items: Sequence[T]) -> list[R]:
        """The answers to these items; an error means that the fate of all of them is unknown."""
        if not items:
            return []
        answer: asyncio.Future[list[R]] = asyncio.get_running_loop().create_future()
        weight = sum(map(self._weigh, items)) if self._weigh else len(items)
        self._waiting.append(_Waiting(items, weight, answer))
        self._weight += weight
        beside = len(self._calls) < self._calls_max and self._weight >= LOAD
        if beside or not self._calls:
            self._calls.add(asyncio.create_task(self._work()))
        return await answer

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._send_some(self._next())
        finally:
            # At once: what comes after the last look must not count on this call.
            self._calls.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _next(self) -> list[_Waiting[T, R]]:
        """What goes together: at least one request."""
        taken = [self._waiting.popleft()]
        count = len(taken[0].items)
        while self._waiting and count + len(self._waiting[0].items) <= self._items_max:
            taken.append(self._waiting.popleft())
            count += len(taken[-1].items)
        self._weight -= sum(each.weight for each in taken)
        return taken

    async def _send_some(self, taken: list[_Waiting[T, R]]) -> None:
        try:
            answers = await self._send([item for each in taken for item in each.items])
        except Exception as error:
            for each in taken:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        at = 0
        for each in taken:
            mine = answers[at : at + len(each.items)]
            at += len(each.items)
            if not each.answer.done():
                each.answer.set_result(mine)
