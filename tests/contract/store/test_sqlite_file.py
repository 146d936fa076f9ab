"""One SQLite file of a process: what waits is written together, and nobody waits for long."""

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from leasehold.core.errors import ServerError
from leasehold.store.sqlite import close_file, open_file


def prepare(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY)")


def adds(number: int, hold_s: float = 0.0) -> Any:
    def step(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO t VALUES (?)", (number,))
        time.sleep(hold_s)  # work within the transaction
        return number

    return step


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
        stored = await file.read(
            lambda connection: connection.execute("SELECT n FROM t").fetchall()
        )
        assert [row[0] for row in stored] == [1, 2, 3]
    finally:
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
