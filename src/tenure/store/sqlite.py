"""One SQLite file in a process: a writer thread, a reader thread, and a fair lock for writers.

The writer commits all waiting steps in one transaction, each in its own savepoint, so that many
small writes share one sync. Transactions are `BEGIN IMMEDIATE` under a lock that all our processes
share, so none of them gets "database is locked". Reads have their own connection and never wait for
writes. All users of a file in one process share the threads; a forked process starts its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import os
import queue
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from tenure.core.errors import ServerError, StoreUnreachable, UsageError
from tenure.store.file_notifier import notify
from tenure.store.files import open_private, private_database

Step = Callable[[sqlite3.Connection], Any]
Topics = Callable[[sqlite3.Connection], Sequence[str]]
"""Returns the topics that have new work, from a transaction that is about to be committed."""

NEXT_SUFFIX, LOCK_SUFFIX = "-next", "-lock"
"""Suffixes of the two lock files."""

PIPES_SUFFIX = "-pipes"
"""Suffix of the folder with the pipes of `file_notifier`."""

_VERSION_MIN = (3, 37, 0)
_BUSY_MS = 30_000
_GROUP_MAX = 100
# A transaction starts no step after this time, because other processes wait for the lock.
_TRANSACTION_S_MAX = 0.02
_MTIME_STEP_NS = 20_000_000  # longer than the resolution of a file system's timestamps
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


class FairLock:
    """A first-come lock between processes, for one thread each: `with lock:`.

    SQLite's own lock has no order: with four writers one of them may wait for seconds. Here a
    writer locks `next`, then the lock itself, and then releases `next`. A writer that has just
    released the lock finds `next` taken by a waiting one. The kernel releases both when a process
    dies.
    """

    def __init__(self, path: Path) -> None:
        self._next = open_private(path.with_name(path.name + NEXT_SUFFIX))
        self._lock = open_private(path.with_name(path.name + LOCK_SUFFIX))

    def __enter__(self) -> None:
        fcntl.flock(self._next, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def touch(self) -> None:
        """Write to the `next` file, for processes that watch it.

        The write fails on a full disk. It is ignored: watchers poll as well, and the commit has
        succeeded.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._next, b"\0", 0)

    def close(self) -> None:
        os.close(self._next)
        os.close(self._lock)


@dataclass(slots=True)
class _Call:
    """A step to run in a thread, and the future of its caller."""

    step: Step
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop

    def resolve(self, value: Any, error: BaseException | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self.loop.call_soon_threadsafe(self._set, value, error)

    def _set(self, value: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)


_Calls: TypeAlias = "queue.SimpleQueue[_Call | None]"
_Result = tuple[_Call, Any, BaseException | None]


class SqliteFile:
    """The threads of one file in this process; see `open_file`."""

    def __init__(
        self, path: Path, synchronous: str, prepare: Step, client: str, topics: Topics
    ) -> None:
        if sqlite3.sqlite_version_info < _VERSION_MIN:
            raise UsageError(f"SQLite {sqlite3.sqlite_version} is too old; 3.37 or later is needed")
        self.path = path
        self.client = client
        self.users = 0
        self.prepared = False
        self._synchronous = synchronous
        self._prepare = prepare
        self._topics = topics
        self._wal = path.with_name(path.name + "-wal")
        self._pipes = path.with_name(path.name + PIPES_SUFFIX)
        self._writes: _Calls = queue.SimpleQueue()
        self._reads: _Calls = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._write_loop, name=f"write {path.name}", daemon=True),
            threading.Thread(target=self._read_loop, name=f"read {path.name}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    async def write(self, step: Step) -> Any:
        """Run a step in a transaction; it is committed when this returns."""
        return await self._call(self._writes, step)

    async def read(self, step: Step) -> Any:
        """Run a step that only reads; it sees everything committed before.

        If the caller is cancelled before its turn, the step is not run.
        """
        return await self._call(self._reads, step)

    def end(self) -> None:
        """End the threads after the waiting calls."""
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    async def _call(self, calls: _Calls, step: Step) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        calls.put(_Call(step, future, loop))
        return await future

    def _write_loop(self) -> None:
        connection: sqlite3.Connection | None = None
        lock: FairLock | None = None
        group: list[_Call] | None = []
        results: list[_Result]
        while group or (group := _next_group(self._writes)) is not None:
            try:
                if connection is None or lock is None:
                    lock = lock or FairLock(self.path)
                    with lock:
                        connection = self._prepared_connection()
                began_ns = time.time_ns()
                with lock:
                    results, topics = _commit(connection, group, self._topics)
                # After the commit: a watcher that woke when the log grew may have read too early.
                if self._was_written_since(began_ns):
                    lock.touch()
                for topic in topics:
                    notify(self._pipes, topic)
            except Exception as error:
                results = [(call, None, error) for call in group]
                if connection is not None and isinstance(error, sqlite3.Error | OSError):
                    connection.close()
                    connection = None
            for call, value, fault in results:
                call.resolve(value, fault and self._translated(fault))
            group = group[len(results) :]  # the transaction had no time for these
        if connection is not None:
            connection.close()
        if lock is not None:
            lock.close()

    def _was_written_since(self, began_ns: int) -> bool:
        """Whether a transaction changed anything; if not, no process is woken."""
        try:
            return self._wal.stat().st_mtime_ns > began_ns - _MTIME_STEP_NS
        except FileNotFoundError:
            return False

    def _prepared_connection(self) -> sqlite3.Connection:
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
            if call.future.done():  # its caller has gone, and others wait
                continue
            try:
                if connection is None:
                    connection = _connect(self.path, self._synchronous, self.client)
                    connection.execute("PRAGMA query_only = on")
                call.resolve(call.step(connection))
            except Exception as error:
                call.resolve(None, self._translated(error))
        if connection is not None:
            connection.close()

    def _translated(self, error: BaseException) -> BaseException:
        if isinstance(error, sqlite3.OperationalError | OSError):
            return StoreUnreachable(f"SQLite file {self.path} cannot be used: {error}")
        if isinstance(error, sqlite3.Error):
            return ServerError(f"SQLite file {self.path.name} refused: {error}", reply=error)
        return error


def _next_group(calls: _Calls) -> list[_Call] | None:
    """All waiting calls, at least one; None if the thread should end."""
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
) -> tuple[list[_Result], Sequence[str]]:
    """Run the steps there is time for, keep those that succeed, and commit once."""
    connection.execute("BEGIN IMMEDIATE")
    until = time.monotonic() + _TRANSACTION_S_MAX
    results: list[_Result] = []
    try:
        for call in group:
            if results and time.monotonic() > until:
                break
            connection.execute("SAVEPOINT step")
            try:
                results.append((call, call.step(connection), None))
            except Exception as error:
                connection.execute("ROLLBACK TO step")
                results.append((call, None, error))
            connection.execute("RELEASE step")
        topics = find_topics(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return results, topics


def _connect(path: Path, synchronous: str, client: str) -> sqlite3.Connection:
    private_database(path)
    if client == "libsql":
        connection = cast("sqlite3.Connection", LibsqlConnection(path))
    else:
        connection = sqlite3.connect(
            path,
            timeout=_BUSY_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=500,
        )
        connection.row_factory = sqlite3.Row
        connection.create_function("from_base64", 1, _from_base64, deterministic=True)
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


def _from_base64(text: str | None) -> bytes | None:
    """An SQL function: batches are JSON, and carry bytes as base64."""
    return None if text is None else base64.b64decode(text)


_open_files: dict[tuple[int, Path], SqliteFile] = {}
_open_files_lock = threading.Lock()


def open_file(
    path: Path,
    synchronous: str,
    prepare: Step,
    client: str = "sqlite",
    topics: Topics = lambda _: (),
) -> SqliteFile:
    """The file's threads in this process; the first call starts them."""
    with _open_files_lock:
        key = (os.getpid(), path)
        file = _open_files.get(key)
        if file is None:
            file = _open_files[key] = SqliteFile(path, synchronous, prepare, client, topics)
        elif file.client != client:  # two libraries in one process release each other's locks
            raise UsageError(
                f"{path.name} is open by the {file.client} client in this process; use one for all"
            )
        file.users += 1
        return file


def close_file(file: SqliteFile) -> None:
    """Stop using a file; the last user ends its threads."""
    with _open_files_lock:
        file.users -= 1
        if file.users:
            return
        _open_files.pop((os.getpid(), file.path), None)
    file.end()


_NAMED = re.compile(r"(?<![:\w\"]):([a-z_]+)\b")
_REFUSALS = ("constraint", "transition:")


class LibsqlConnection:
    """Wraps libsql's client in the part of `sqlite3.Connection` that the store uses.

    That client has no named parameters, no rows by name and no custom functions. It turns integers
    above 32 bits into floats, and raises `ValueError` for every error.
    """

    def __init__(self, path: Path, busy_ms: int = _BUSY_MS) -> None:
        try:
            import libsql
        except ImportError:
            raise UsageError(
                "libsql:// needs the libsql client: pip install 'tenure[libsql]', or write "
                "sqlite:// for the same file"
            ) from None
        self._connection = libsql.connect(str(path), isolation_level=None)
        self.execute(f"PRAGMA busy_timeout = {busy_ms}")

    def execute(self, statement: str, given: Mapping[str, Any] | Sequence[Any] = ()) -> _Rows:
        """Run one statement, with parameters by name or by position."""
        named = given if isinstance(given, Mapping) else {}
        numbers = frozenset(name for name, value in named.items() if isinstance(value, int))
        text, names = _positional(statement, numbers)
        values = [str(int(named[name])) if name in numbers else named[name] for name in names]
        try:
            cursor = self._connection.execute(text, tuple(values or given))
            columns = tuple(column[0] for column in cursor.description or ())
            return _Rows(columns, cursor.fetchall() if columns else [])
        except ValueError as error:
            if any(word in str(error).lower() for word in _REFUSALS):
                raise sqlite3.IntegrityError(str(error)) from None
            raise sqlite3.OperationalError(str(error)) from None

    @property
    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction)

    def close(self) -> None:
        self._connection.close()


class _Rows:
    """The rows of one statement."""

    def __init__(self, columns: tuple[str, ...], rows: Sequence[Sequence[Any]]) -> None:
        indexes = {name: index for index, name in enumerate(columns)}
        self._rows = [_NamedRow(indexes, row) for row in rows]

    def fetchall(self) -> list[_NamedRow]:
        return self._rows

    def fetchone(self) -> _NamedRow | None:
        return self._rows[0] if self._rows else None

    def __iter__(self) -> Iterator[_NamedRow]:
        return iter(self._rows)


class _NamedRow:
    """A row that is read by name or by position."""

    __slots__ = ("_indexes", "_values")

    def __init__(self, indexes: Mapping[str, int], values: Sequence[Any]) -> None:
        self._indexes = indexes
        self._values = values

    def __getitem__(self, key: int | str) -> Any:
        return self._values[self._indexes[key] if isinstance(key, str) else key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> list[str]:
        return list(self._indexes)


@lru_cache(maxsize=1_000)
def _positional(statement: str, numbers: frozenset[str]) -> tuple[str, tuple[str, ...]]:
    names: list[str] = []

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in names:
            names.append(name)
        at = f"?{names.index(name) + 1}"
        return f"CAST({at} AS INTEGER)" if name in numbers else at

    # It has no `from_base64`. Bytes are sent as hex, which it can decode itself.
    return _NAMED.sub(replace, statement).replace("from_base64(", "unhex("), tuple(names)


def in_hex(batch: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """A batch with its bytes as hex, for libsql, which has no custom functions."""
    return [[one.hex() if isinstance(one, bytes) else one for one in row] for row in batch]
