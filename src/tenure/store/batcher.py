"""Calls that several callers share: group commit (`Batcher`), turns (`Turns`) and cached reads
(`CachedLookup`).

Group commit: requests that arrive while a call is under way share the next one. A single request
leaves at once. Under load many requests share one round trip, which costs the store hardly more
than one of them; each still gets its own answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Generic, TypeVar, cast
from weakref import WeakValueDictionary

import msgspec

T = TypeVar("T")
R = TypeVar("R")

SECOND_CALL_WEIGHT = 100
"""From this total weight of waiting items on, a second call is started beside the first.

Below it they wait for one large call, which costs the store less than several small ones."""


class _Request(msgspec.Struct, Generic[T, R], frozen=True):
    items: Sequence[T]
    weight: int
    size: int
    answer: asyncio.Future[list[R]]


class TooManyWaiting(Exception):
    """Too many items of the caller wait already; none of these was sent. `weight` is what waits."""

    def __init__(self, weight: int) -> None:
        super().__init__(f"items of weight {weight} wait")
        self.weight = weight


class _Caller(Generic[T, R]):
    """The requests of one caller that wait, and their weight."""

    __slots__ = ("requests", "weight")

    def __init__(self) -> None:
        self.requests: deque[_Request[T, R]] = deque()
        self.weight = 0


class Batcher(Generic[T, R]):
    """`send` returns one answer per item, in order; at most `calls_max` calls run at a time.

    `weigh` returns the weight of an item (1 by default), see `SECOND_CALL_WEIGHT`. A batch has at
    most `items_max` items and, with `measure`, a total size of at most `size_max`. With
    `drops_gone` a request is not sent if its caller was cancelled before. With `caller_of`, which
    returns the caller of a request by its first item, callers take turns: one request of each goes
    into a batch before the second one of any, and a caller with requests in the last batch comes
    last. A caller that has a name may then have a weight of `waiting_max` waiting.
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
        caller_of: Callable[[T], str] | None = None,
        waiting_max: int = 0,
    ) -> None:
        self._send = send
        self._items_max = items_max
        self._calls_max = calls_max
        self._weigh = weigh
        self._size_max = size_max
        self._measure = measure
        self._drops_gone = drops_gone
        self._caller_of = caller_of
        self._waiting_max = waiting_max
        self._weight = 0
        self._waiting: OrderedDict[str, _Caller[T, R]] = OrderedDict()
        self._last_callers: dict[str, None] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(self, items: Sequence[T]) -> list[R]:
        """The answers to these items; after an error it is unknown which were executed.

        Raises `TooManyWaiting` before anything is executed.
        """
        if not items:
            return []
        answer: asyncio.Future[list[R]] = asyncio.get_running_loop().create_future()
        weight = sum(map(self._weigh, items)) if self._weigh else len(items)
        size = sum(map(self._measure, items)) if self._measure else 0
        name = self._caller_of(items[0]) if self._caller_of else ""
        caller = self._waiting.get(name)
        if caller is None:
            caller = self._waiting[name] = _Caller()
        elif name and caller.weight + weight > self._waiting_max > 0:
            raise TooManyWaiting(caller.weight)
        caller.requests.append(_Request(items, weight, size, answer))
        caller.weight += weight
        self._weight += weight
        if not self._calls or (
            self._weight >= SECOND_CALL_WEIGHT and len(self._calls) < self._calls_max
        ):
            self._calls.add(asyncio.create_task(self._work()))
        return await answer

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._send_batch(self._next_batch())
        finally:
            # Without an await in between: a request that comes after the last check starts a task.
            self._calls.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _next_batch(self) -> list[_Request[T, R]]:
        """The first request of each caller in turn, until one does not fit."""
        waiting, last, self._last_callers = self._waiting, self._last_callers, {}
        if len(waiting) > 1:
            for name in last:
                if name in waiting:
                    waiting.move_to_end(name)
        batch: list[_Request[T, R]] = []
        count = size = 0
        while waiting:
            name, caller = next(iter(waiting.items()))
            is_alone = len(waiting) == 1
            while caller.requests:
                request = caller.requests[0]
                count, size = count + len(request.items), size + request.size
                if batch and (count > self._items_max or size > self._size_max):
                    return batch
                caller.requests.popleft()
                caller.weight -= request.weight
                self._weight -= request.weight
                if self._drops_gone and request.answer.done():
                    count, size = count - len(request.items), size - request.size
                    continue
                batch.append(request)
                self._last_callers[name] = None
                if not is_alone:
                    break
            if caller.requests:
                waiting.move_to_end(name)
            else:
                del waiting[name]
        return batch

    async def _send_batch(self, batch: list[_Request[T, R]]) -> None:
        if not batch:
            return
        try:
            answers = await self._send([item for request in batch for item in request.items])
        except Exception as error:
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(error)
            return
        at = 0
        for request in batch:
            end = at + len(request.items)
            if not request.answer.done():
                request.answer.set_result(answers[at:end])
            at = end


class Turns:
    """At most `most` calls of a caller at a time; its further ones wait.

    So many as `waiting_max` may wait (0: any number), else `TooManyWaiting` is raised.
    """

    def __init__(self, most: int, *, waiting_max: int = 0) -> None:
        self._most = most
        self._waiting_max = waiting_max
        self._turns: WeakValueDictionary[str, _Turn] = WeakValueDictionary()

    def of(self, caller: str) -> AbstractAsyncContextManager[None]:
        """A turn, as a context; the anonymous local caller has no limit."""
        if not caller:
            return nullcontext()
        turn = self._turns.get(caller)
        if turn is None:
            turn = self._turns[caller] = _Turn(self._most, self._waiting_max)
        return turn


class _Turn:
    """The turns of one caller."""

    def __init__(self, most: int, waiting_max: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._waiting_max = waiting_max
        self._waiting = 0

    async def __aenter__(self) -> None:
        if self._waiting_max and self._waiting >= self._waiting_max:
            raise TooManyWaiting(self._waiting)
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1

    async def __aexit__(self, *_: object) -> None:
        self._free.release()


class CachedLookup(Generic[R]):
    """Caches the result of `load` for a key; concurrent lookups of a key share one call.

    A result is kept for `keep_s`, counted from the call. Errors are not cached.
    """

    def __init__(
        self,
        load: Callable[[str], Awaitable[R]],
        *,
        keep_s: float,
        keys_max: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._keep_s = keep_s
        self._keys_max = keys_max
        self._clock = clock
        self._found: dict[str, tuple[float, R]] = {}
        self._loading: dict[str, asyncio.Task[R]] = {}

    async def get(self, key: str) -> R:
        """The result, at most `keep_s` old."""
        found = self._found.get(key)
        if found is not None and self._clock() < found[0]:
            return found[1]
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.create_task(self._refresh(key))
        # Shielded: a caller that is cancelled must not cancel the lookup of the others.
        return await asyncio.shield(loading)

    def last(self, key: str) -> R | None:
        """The last result, however old; None if there is none."""
        found = self._found.get(key)
        return None if found is None else found[1]

    async def _refresh(self, key: str) -> R:
        until = self._clock() + self._keep_s
        try:
            result = await self._load(key)
        finally:
            del self._loading[key]
        if len(self._found) >= self._keys_max:  # a flood of made-up keys must not fill the memory
            self._found.clear()
        self._found[key] = (until, result)
        return result
