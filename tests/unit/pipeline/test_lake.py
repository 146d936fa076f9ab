"""Which folders are lakes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from tenure.core.errors import UsageError
from tenure.core.journal import JournalEvent, SqlFormat
from tenure.pipeline.delta_rs import DeltaReader
from tenure.pipeline.lake import Lake
from tenure.pipeline.schema import OFFSET, rows_of
from tenure.pipeline.source.sql_reader import open_database


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "lake.json").write_text('{"tenure": "lake", "schema": 3}')
    (tmp_path / "events" / "day=2026-11-01").mkdir(parents=True)
    return tmp_path


def test_a_lake_of_plain_files_is_not_captured_into_because_its_files_would_be_strays(
    old: Path,
) -> None:
    with pytest.raises(UsageError, match=r"older version.*tenure pipeline audit"):
        Lake(str(old)).begin()
    assert not (old / "events" / "_delta_log").exists()


def test_a_lake_of_plain_files_is_not_read_as_an_empty_one(old: Path) -> None:
    with pytest.raises(UsageError, match="older version"):
        Lake(str(old)).require()


def test_a_lake_may_be_named_by_a_file_url(tmp_path: Path) -> None:
    Lake(f"file://{tmp_path}/lake").begin()
    Lake(f"{tmp_path}/lake").require()


def event(**fields: object) -> JournalEvent:
    made = {"seq": "1-0.0", "contract": "streams", "queue": "jobs", "job_id": "a", "type": "submit"}
    return msgspec.convert(made | {"ts_ms": 5, "ver": 1} | fields, JournalEvent)


def test_an_event_that_calls_itself_an_offset_moves_no_position(tmp_path: Path) -> None:
    """Else one line of a writer in a store could end a capture, or let it skip what follows."""
    lake = Lake(f"{tmp_path}/lake")
    lake.begin()
    told = {"after": 0, "upto": 50, "units": 1}
    data = msgspec.json.encode(told).decode()
    own = {"contract": "", "queue": "", "job_id": "", "type": OFFSET, "ver": 0, "data": data}
    far = msgspec.json.encode(told | {"upto": 2**60}).decode()
    hostile = [event(type=OFFSET, data=each) for each in (far, "", "{", "[1]")]
    lake.events.put_events([rows_of([*hostile, event(), event(**own)], "j")])
    assert lake.events.positions(["j"]) == {"j": 50}
    assert [row["type"] for row in lake.events.rows()] == [*[OFFSET] * 4, "submit"]


def test_long_texts_and_many_days_are_written_and_read_back(tmp_path: Path) -> None:
    lake = Lake(f"{tmp_path}/lake")
    lake.begin()
    lake.events.put_events([rows_of([event(job_id="x" * 100_000, task="é" * 9_000)], "j")])
    (row,) = lake.events.rows()
    assert (len(row["job_id"]), len(row["task"])) == (100_000, 9_000)
    days = lake.table("days")
    schema = pa.schema([("n", pa.int64()), ("day", pa.string())])
    days.create(schema, "day")
    days.put(pa.table({"n": range(400), "day": [f"day-{n}" for n in range(400)]}, schema), "day")
    assert sum(days.parts().values()) == 400


def test_a_text_of_a_table_that_is_not_utf_8_does_not_end_its_reading(tmp_path: Path) -> None:
    """Another program may write any bytes into a journal in SQLite."""
    with sqlite3.connect(tmp_path / "jobs.db") as file:
        file.execute("CREATE TABLE job_journal (seq INTEGER PRIMARY KEY, job_id TEXT) STRICT")
        rows = [(n, f"job-{n}") for n in range(25_000)]
        file.executemany("INSERT INTO job_journal VALUES (?, ?)", rows)
        file.execute("UPDATE job_journal SET job_id = CAST(x'ff41' AS TEXT) WHERE seq = 12000")
    file.close()
    store = f"sqlite:///{tmp_path}/jobs.db"
    source = SqlFormat(store=store, table="job_journal", contract="inbox", queue="q", fields=())
    database = open_database(source)
    try:
        query = "SELECT seq, job_id FROM job_journal ORDER BY seq"
        found = [row for batch in database.batches(query) for row in batch.to_pylist()]
    finally:
        database.close()
    wanted = [(n, "\ufffdA" if n == 12_000 else job_id) for n, job_id in rows]
    assert [(row["seq"], row["job_id"]) for row in found] == wanted


def test_the_source_in_python_reads_a_table_on_a_disk_too(tmp_path: Path) -> None:
    table = Lake(str(tmp_path / "lake")).table("slo")
    rows = pa.table({"queue": ["a", "b"], "day": ["2026-11-17", "2026-11-18"]})
    table.create(rows.schema, "day")
    table.put(rows, "day")
    reader = DeltaReader(table.options)
    found = [
        row for part in reader.partitions() for batch in reader.read(part)
        for row in batch.to_pylist()
    ]  # fmt: skip
    assert sorted(row["queue"] for row in found) == ["a", "b"]
