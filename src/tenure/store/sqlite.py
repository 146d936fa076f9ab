"""A fair lock between processes: whoever lets go cannot take it again before those who wait.

A writer first takes the place in front (`next`), then the lock itself, then leaves the place. One
that just let go finds the place taken. SQLite's own lock has no such order: with four writers one
of them may wait for seconds. The kernel frees both when a process dies.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

from tenure.core.errors import ServerError, StoreUnreachable, UsageError
from tenure.store.file_notifier import notify
from tenure.store.files import private_database, private_file

NEXT_SUFFIX, LOCK_SUFFIX = "-next", "-lock"
"""What the names of the files of the place in front and of the lock itself end with."""


class FairLock:
    """Used as `with turnstile:` by one thread; waits without using the processor."""

    def __init__(self, path: Path) -> None:
        self._next = _open_private(path.with_name(path.name + NEXT_SUFFIX))
        self._lock = _open_private(path.with_name(path.name + LOCK_SUFFIX))

    def __enter__(self) -> None:
        fcntl.flock(self._next, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def tell(self) -> None:
        """Write to the file of the place in front, for those who watch it.

        A full disk takes no byte. They look by their own clocks too, and what was committed before
        must not be told as failed.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._next, b"\0", 0)

    def close(self) -> None:
        """Give the files back."""
        os.close(self._next)
        os.close(self._lock)


def _open_private(path: Path) -> int:
    private_file(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


T = TypeVar("T")
Step = Callable[[sqlite3.Connection], Any]
Topics = Callable[[sqlite3.Connection], Sequence[str]]
"""What a transaction that is about to be committed has work for, and forgets it."""

PIPES_SUFFIX = "-bells"
"""What the name of the folder ends with in which those who wait have their pipes."""

VERSION_MIN = (3, 37, 0)
BUSY_MS = 30_000
_GROUP_MAX = 100
_HOLD_S = 0.02
"""A transaction takes no further part after this: others wait for the lock meanwhile, and for ever
if this process is stopped inside it."""

_TICK_NS = 20_000_000
"""Longer than any step of the clock by which a file system stamps its files."""

_NOW = "SELECT CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


def file_of(url: str) -> Path:
    """The file of `sqlite:///relative.db` or `sqlite:////absolute.db`."""
    parts = urlsplit(url)
    name = unquote(parts.path[1:])
    if parts.netloc or not name or name == ":memory:":
        raise UsageError(
            f"{url!r} names no file; write sqlite:///jobs.db (relative) or sqlite:////data/jobs.db"
        )
    return Path(name).absolute()


def now_ms(connection: sqlite3.Connection) -> int:
    """The store's clock."""
    return int(connection.execute(_NOW).fetchone()[0])


@dataclass(slots=True)
class _Call:
    step: Step
    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop

    def give(self, value: Any, error: BaseException | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop that asked is gone
            self.loop.call_soon_threadsafe(self._set, value, error)

    def _set(self, value: Any, error: BaseException | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(error)


class SqliteFile:
    """The threads of one file in this process; see `open_file`."""

    def __init__(
        self,
        path: Path,
        synchronous: str,
        prepare: Step,
        client: str = "sqlite",
        topics: Topics = lambda _: (),
    ) -> None:
        if sqlite3.sqlite_version_info < VERSION_MIN:
            raise UsageError(f"SQLite {sqlite3.sqlite_version} is too old; 3.37 or later is needed")
        self.path = path
        self._wal = path.with_name(path.name + "-wal")
        self._synchronous = synchronous
        self._prepare = prepare
        self._topics = topics
        self._bells = path.with_name(path.name + PIPES_SUFFIX)
        self.client = client
        self._writes: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.users = 0
        self.prepared = False
        self._threads = [
            threading.Thread(target=self._write_loop, name=f"write {path.name}", daemon=True),
            threading.Thread(target=self._read_loop, name=f"read {path.name}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    async def write(self, step: Step) -> Any:
        """Run a step in a transaction; it is committed when this returns."""
        return await self._ask(self._writes, step)

    async def read(self, step: Step) -> Any:
        """Run a step that only reads; it sees everything that was committed before."""
        return await self._ask(self._reads, step)

    def end(self) -> None:
        """Let the threads go once they have done what was asked."""
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    async def _ask(self, calls: queue.SimpleQueue[_Call | None], step: Step) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        calls.put(_Call(step, answer, loop))
        return await answer

    def _write_loop(self) -> None:
        connection: sqlite3.Connection | None = None
        turnstile: FairLock | None = None
        group: list[_Call] | None = []
        while group or (group := _group(self._writes)) is not None:
            try:
                if connection is None or turnstile is None:
                    turnstile = turnstile or FairLock(self.path)
                    with turnstile:
                        connection = self._opened()
                began_ns = time.time_ns()
                with turnstile:
                    answers, topics = _commit(connection, group, self._topics)
                self._announce(turnstile, began_ns, topics)
            except (sqlite3.Error, OSError) as error:
                answers = [(call, None, error) for call in group]
                if connection is not None:
                    connection.close()
                connection = None
            except Exception as error:
                answers = [(call, None, error) for call in group]
            for call, value, fault in answers:
                call.give(value, fault and self._told(fault))
            group = group[len(answers) :]  # what the transaction had no time for
        if connection is not None:
            connection.close()
        if turnstile is not None:
            turnstile.close()

    def _announce(self, turnstile: FairLock, began_ns: int, topics: Sequence[str]) -> None:
        """Tell those who watch the file, and one who waits for each topic."""
        # Whoever saw the log grow may have looked before the commit counted.
        if self._written_since(began_ns):
            turnstile.tell()
        for topic in topics:
            notify(self._bells, topic)

    def _written_since(self, began_ns: int) -> bool:
        """Whether a transaction left something; one that did not must wake nobody."""
        try:
            return self._wal.stat().st_mtime_ns > began_ns - _TICK_NS
        except FileNotFoundError:
            return False

    def _opened(self) -> sqlite3.Connection:
        """A connection that is ready for steps; one that cannot be made ready is not kept."""
        connection = _connect(self.path, self._synchronous, self.client)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self.prepared = True
        return connection

    def _read_loop(self) -> None:
        connection: sqlite3.Connection | None = None
        while (call := self._reads.get()) is not None:
            try:
                if connection is None:
                    connection = _connect(self.path, self._synchronous, self.client)
                    connection.execute("PRAGMA query_only = on")
                call.give(call.step(connection))
            except Exception as error:
                call.give(None, self._told(error))
        if connection is not None:
            connection.close()

    def _told(self, error: BaseException) -> BaseException:
        if isinstance(error, sqlite3.IntegrityError):
            return ServerError(f"SQLite file {self.path.name} refused: {error}", reply=error)
        if isinstance(error, sqlite3.OperationalError | OSError):
            return StoreUnreachable(f"SQLite file {self.path} cannot be used: {error}")
        if isinstance(error, sqlite3.Error):
            return ServerError(f"SQLite file {self.path.name} refused: {error}", reply=error)
        return error


def _group(calls: queue.SimpleQueue[_Call | None]) -> list[_Call] | None:
    """What waits now, at least one; None when it is time to end."""
    first = calls.get()
    if first is None:
        return None
    group = [first]
    while len(group) < _GROUP_MAX:
        try:
            call = calls.get_nowait()
        except queue.Empty:
            break
        if call is None:
            calls.put(None)
            break
        group.append(call)
    return group


def _commit(
    connection: sqlite3.Connection, group: Sequence[_Call], find_topics: Topics
) -> tuple[list[tuple[_Call, Any, BaseException | None]], Sequence[str]]:
    """Run the steps there is time for, keep those that went well, and commit once."""
    connection.execute("BEGIN IMMEDIATE")
    until = time.monotonic() + _HOLD_S
    answers: list[tuple[_Call, Any, BaseException | None]] = []
    try:
        for call in group:
            if answers and time.monotonic() > until:
                break
            connection.execute("SAVEPOINT step")
            try:
                answers.append((call, call.step(connection), None))
            except Exception as error:
                connection.execute("ROLLBACK TO step")
                answers.append((call, None, error))
            connection.execute("RELEASE step")
        topics = find_topics(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return answers, topics


def _connect(path: Path, synchronous: str, client: str) -> sqlite3.Connection:
    private_database(path)
    connection = _by_libsql(path) if client == "libsql" else _by_sqlite(path)
    for pragma in (
        "journal_mode = WAL",
        f"synchronous = {synchronous}",
        "temp_store = MEMORY",
        "cache_size = -32768",
        "mmap_size = 268435456",
        "wal_autocheckpoint = 4000",
        "foreign_keys = on",
    ):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _by_sqlite(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=BUSY_MS / 1000,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=500,
    )
    connection.row_factory = sqlite3.Row
    connection.create_function("from_base64", 1, _from_base64, deterministic=True)
    return connection


def _by_libsql(path: Path) -> sqlite3.Connection:
    from tenure.store.libsql import LibsqlConnection

    return cast("sqlite3.Connection", LibsqlConnection(path, BUSY_MS))


def _from_base64(text: str | None) -> bytes | None:
    """How bytes travel in a batch, which is JSON."""
    return None if text is None else base64.b64decode(text)


_open_files: dict[tuple[int, Path], SqliteFile] = {}
_opening = threading.Lock()


def open_file(
    path: Path,
    synchronous: str,
    prepare: Step,
    client: str = "sqlite",
    topics: Topics = lambda _: (),
) -> SqliteFile:
    """The file's threads in this process, started for its first user."""
    with _opening:
        key = (os.getpid(), path)
        file = _open_files.get(key)
        if file is None:
            file = _open_files[key] = SqliteFile(path, synchronous, prepare, client, topics)
        elif file.client != client:  # two libraries in one process undo each other's locks
            raise UsageError(
                f"{path.name} is open by the {file.client} client in this process; use one for all"
            )
        file.users += 1
        return file


def close_file(file: SqliteFile) -> None:
    """One user fewer; the last one ends the threads."""
    with _opening:
        file.users -= 1
        if file.users:
            return
        _open_files.pop((os.getpid(), file.path), None)
    file.end()
