"""One SQLite file of a process: what waits is written together, and nobody waits for long."""

import asyncio
import contextlib
import errno
import signal
import sqlite3
import sys
import threading
import time
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from tenure.core.errors import ServerError
from tenure.store.file_notifier import FileWatcher
from tenure.store.sqlite import NEXT_SUFFIX, close_file, open_file
from tests.processes import stop


def prepare(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY)")


def adds(number: int, hold_s: float = 0.0) -> Any:
    def step(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO t VALUES (?)", (number,))
        time.sleep(hold_s)  # work within the transaction
        return number

    return step


def numbers(connection: sqlite3.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT n FROM t ORDER BY n")]


async def test_what_waits_is_one_transaction_and_a_part_that_fails_harms_no_other(
    tmp_path: Path,
) -> None:
    file = open_file(tmp_path / "one.db", "normal", prepare)
    try:
        first = file.write(adds(1, 0.1))
        rest = [file.write(adds(number)) for number in (2, 2, 3)]
        answers = await asyncio.gather(first, *rest, return_exceptions=True)
        assert [answers[0], answers[1], answers[3]] == [1, 2, 3]
        assert isinstance(answers[2], ServerError)
        assert await file.read(numbers) == [1, 2, 3]
    finally:
        await asyncio.to_thread(close_file, file)


async def test_a_read_whose_caller_has_gone_is_not_run(tmp_path: Path) -> None:
    file = open_file(tmp_path / "gone.db", "normal", prepare)
    begun, go, ran = threading.Event(), threading.Event(), list[str]()

    def occupies(connection: sqlite3.Connection) -> None:
        begun.set()
        go.wait(10)

    try:
        await file.write(adds(1))
        first = asyncio.create_task(file.read(occupies))
        await asyncio.to_thread(begun.wait, 10)
        cancelled = asyncio.create_task(file.read(lambda _: ran.append("cancelled")))
        late = asyncio.wait_for(file.read(lambda _: ran.append("late")), 0.05)
        await asyncio.gather(late, return_exceptions=True)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        last = asyncio.create_task(file.read(lambda _: ran.append("last")))
        go.set()
        await asyncio.gather(first, last)
        assert ran == ["last"]
    finally:
        go.set()
        await asyncio.to_thread(close_file, file)


async def test_a_commit_that_nobody_can_be_told_of_is_not_told_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk refuses the byte that wakes others; what was committed before it counts."""
    file = open_file(tmp_path / "full.db", "normal", prepare)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        monkeypatch.setattr("tenure.store.sqlite.os.pwrite", full)
        assert await file.write(adds(1)) == 1
        assert await file.read(numbers) == [1]
    finally:
        monkeypatch.undo()
        await asyncio.to_thread(close_file, file)


@pytest.mark.clause("I-12")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere whoever waits looks by itself")
async def test_those_who_watch_are_told_when_a_commit_counts_and_of_nothing_else(
    tmp_path: Path,
) -> None:
    """The log grows before its commit counts: who looked at that moment was not told again."""
    path = tmp_path / "told.db"
    file = open_file(path, "full", prepare)
    rings: asyncio.Queue[int] = asyncio.Queue()
    other = sqlite3.connect(path)

    def rung() -> None:
        rings.put_nowait(other.execute("SELECT count(*) FROM t").fetchone()[0])

    try:
        await file.write(adds(0))
        watch = FileWatcher(tmp_path, [path.name + NEXT_SUFFIX], rung)
        for number in range(1, 4):
            await file.write(adds(number))
            async with asyncio.timeout(10):
                assert await rings.get() == number + 1
        await asyncio.sleep(0.05)  # longer than a step of the clock that stamps files
        await file.write(lambda connection: None)
        await file.write(adds(4))
        async with asyncio.timeout(10):
            assert await rings.get() == 5
        assert rings.empty()
        watch.close()
    finally:
        other.close()
        await asyncio.to_thread(close_file, file)


@pytest.mark.clause("I-40")
async def test_a_long_line_of_writes_lets_go_of_the_lock_in_between(tmp_path: Path) -> None:
    path = tmp_path / "long.db"
    file = open_file(path, "normal", prepare)
    seen: list[int] = []

    def looks(connection: sqlite3.Connection) -> None:
        other = sqlite3.connect(path)
        seen.extend(row[0] for row in other.execute("SELECT n FROM t"))
        other.close()

    try:
        await file.write(adds(0, 0.1))
        calls = [file.write(adds(1, 0.05)), file.write(adds(2, 0.05)), file.write(looks)]
        await asyncio.gather(*calls)
    finally:
        await asyncio.to_thread(close_file, file)
    assert 1 in seen  # it was committed before the last of those that waited with it


HOLDER = """
import asyncio, sys
from pathlib import Path
from tenure.store.sqlite import open_file
from tests.contract.store.test_sqlite_file import prepare

def step(connection):
    connection.execute("INSERT INTO t VALUES (1)")
    print("inside", flush=True)
    sys.stdin.readline()

file = open_file(Path(sys.argv[1]), "normal", prepare)
asyncio.run(file.write(step))
print("written", flush=True)
"""


@pytest.mark.clause("I-40")
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
async def test_a_process_stopped_inside_its_transaction_holds_writers_up_and_no_longer(
    tmp_path: Path, end: signal.Signals
) -> None:
    path = tmp_path / "held.db"
    file = open_file(path, "normal", prepare)
    await file.write(adds(0))
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(path), stdin=PIPE, stdout=PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert await holder.stdout.readline() == b"inside\n"
        stop(holder.pid)
        holder.stdin.write(b"go on\n")  # nobody reads it before the process goes on
        writing = asyncio.ensure_future(file.write(adds(2)))
        assert await file.read(numbers) == [0]  # readers do not wait
        await asyncio.wait([writing], timeout=0.5)
        assert not writing.done()

        holder.send_signal(end)
        async with asyncio.timeout(10):
            assert await writing == 2
            told = await holder.stdout.read()
            await holder.wait()
        survived = end is signal.SIGCONT
        assert told == (b"written\n" if survived else b"")
        assert await file.read(numbers) == ([0, 1, 2] if survived else [0, 2])
    finally:
        with contextlib.suppress(ProcessLookupError):
            holder.kill()
        await asyncio.to_thread(close_file, file)
