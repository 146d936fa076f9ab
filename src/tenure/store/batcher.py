"""Group commit: what arrives while a call is on its way travels together with the next one.

Alone, a request leaves at once. Under load many requests share one round trip, which costs the
store hardly more than one of them; each still gets its own answer. A second call goes beside the
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
    size: int
    answer: asyncio.Future[list[R]]


class Batcher(Generic[T, R]):
    """`send` answers items in their order; at most `calls_max` calls are under way at a time.

    `weigh` says how much an item asks for; what weighs `LOAD` is worth a call beside others.
    `measure` says how large it is; what goes together is bounded by `items_max` and `size_max`.
    With `drops_gone` a request whose asker has gone before it was sent is not sent at all.
    """

    def __init__(
        self,
        send: Callable[[list[T]], Awaitable[list[R]]],
        *,
        items_max: int,
        calls_max: int = 1,
        weigh: Callable[[T], int] | None = None,
        size_max: int = 0,
        measure: Callable[[T], int] | None = None,
        drops_gone: bool = False,
    ) -> None:
        self._send = send
        self._items_max = items_max
        self._calls_max = calls_max
        self._weigh = weigh
        self._size_max = size_max
        self._measure = measure
        self._drops_gone = drops_gone
        self._weight = 0
        self._waiting: deque[_Waiting[T, R]] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(self, items: Sequence[T]) -> list[R]:
        """The answers to these items; an error means that the fate of all of them is unknown."""
        if not items:
            return []
        answer: asyncio.Future[list[R]] = asyncio.get_running_loop().create_future()
        weight = sum(map(self._weigh, items)) if self._weigh else len(items)
        size = sum(map(self._measure, items)) if self._measure else 0
        self._waiting.append(_Waiting(items, weight, size, answer))
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
        """What goes together: the first request, and what fits beside it."""
        taken: list[_Waiting[T, R]] = []
        count = size = 0
        while self._waiting:
            each = self._waiting[0]
            count, size = count + len(each.items), size + each.size
            if taken and (count > self._items_max or size > self._size_max):
                break
            self._weight -= self._waiting.popleft().weight
            if self._drops_gone and each.answer.done():
                count, size = count - len(each.items), size - each.size
            else:
                taken.append(each)
        return taken

    async def _send_some(self, taken: list[_Waiting[T, R]]) -> None:
        if not taken:
            return
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
