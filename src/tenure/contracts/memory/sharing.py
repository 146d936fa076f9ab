"""One store for all who name it in this process: threads and event loops share it by a lock.

Steps are short and never wait, so a plain lock is held around each. Whoever waits for something to
happen does so in its own event loop, and is woken there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias, TypeVar

import msgspec

from tenure.contracts.memory.options import MemoryOptions
from tenure.contracts.memory.store import MemoryStore
from tenure.contracts.memory.stored import CONTRACT
from tenure.core.errors import UsageError
from tenure.core.opening import QueueUrl

T = TypeVar("T")
Waiters: TypeAlias = dict[asyncio.Future[None], asyncio.AbstractEventLoop]

# Wall time that cannot jump: read once, then advanced by the monotonic clock.
_EPOCH_MS = time.time() - time.monotonic()


def clock_ms() -> int:
    """Milliseconds since 1970 that never go backwards within this process."""
    return int((_EPOCH_MS + time.monotonic()) * 1000)


class SharedStore:
    """A store, its lock, and those who wait for work or for the next journal event."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._for_work: Waiters = {}
        self._for_news: Waiters = {}

    def run(self, step: Callable[[MemoryStore], T]) -> T:
        """One atomic step; wakes in every loop those who wait for what it brought."""
        contents = self.store.contents
        with self._lock:
            work = contents.line.arrivals, contents.paused
            news = len(contents.history)
            self.store.begin()
            answer = step(self.store)
            woken: Waiters = {}
            if (contents.line.arrivals, contents.paused) != work:
                woken, self._for_work = self._for_work, {}
            if len(contents.history) != news:
                woken, self._for_news = woken | self._for_news, {}
        _wake(woken)
        return answer

    def wake(self) -> None:
        """Let everybody look again: the clock was moved by hand."""
        with self._lock:
            woken = self._for_work | self._for_news
            self._for_work, self._for_news = {}, {}
        _wake(woken)

    @contextmanager
    def change(self, *, of_work: bool) -> Iterator[asyncio.Future[None]]:
        """A future of the running loop, done after the next change. Enter first, then look."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            (self._for_work if of_work else self._for_news)[future] = loop
        try:
            yield future
        finally:
            with self._lock:
                self._for_work.pop(future, None)
                self._for_news.pop(future, None)
            future.cancel()


def _wake(waiters: Waiters) -> None:
    here = asyncio._get_running_loop()
    for future, loop in waiters.items():
        if loop is here:
            _done(future)
        else:
            with suppress(RuntimeError):  # that loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(_done, future)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_shared: dict[str, tuple[SharedStore, dict[str, str]]] = {}
_shared_lock = threading.Lock()


def shared_store(url: QueueUrl) -> SharedStore:
    """The store of this name, made on first use; its options are those of all URLs together."""
    options, rest = url.read(MemoryOptions)
    if rest:
        raise UsageError(f"queue URL {url.safe}: memory does not know {rest!r}", contract=CONTRACT)
    name = url.text.partition("://")[2].partition("?")[0].strip("/") or "default"
    with _shared_lock:
        if name not in _shared:
            _shared[name] = SharedStore(MemoryStore(name, options, now_ms=clock_ms)), {}
        shared, given = _shared[name]
        _agree(shared, given, url)
    return shared


def share(shared: SharedStore) -> None:
    """Give a store that was made by hand (own clock, own rules) a name that URLs can open."""
    with _shared_lock:
        _shared[shared.store.contents.name] = shared, {}


def forget(name: str) -> None:
    """Drop the store of this name; whoever holds it keeps it."""
    with _shared_lock:
        _shared.pop(name, None)


def _agree(shared: SharedStore, given: dict[str, str], url: QueueUrl) -> None:
    """Take over options that no URL gave before; refuse to change one that is in use."""
    for key, value in url.options.items():
        if given.setdefault(key, value) != value:
            name = shared.store.contents.name
            raise UsageError(
                f"queue URL {url.safe}: memory://{name} is open with {key}={given[key]}; "
                "use the same value or another name",
                contract=CONTRACT,
            )
    current = msgspec.structs.asdict(shared.store.options)
    merged = msgspec.convert(current | given, MemoryOptions, strict=False)
    shared.store.use(merged)
