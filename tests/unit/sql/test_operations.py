"""Batches of statements: as arrays, and in the short form where most of a batch is alike."""

from pathlib import Path

import pytest

from tenure.sql.engine import INBOX
from tenure.sql.operations import SEPARATOR, load_operation
from tenure.sql.postgres_engine import PostgresEngine, given

SQL = """-- Ends things.
-- Batch: job_id text, fence bigint, size bigint, note text
-- Alike: fence, note
-- Takes: queue text
SELECT * FROM {batch} WHERE queue = :queue
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "end.sql"
    file.write_text(SQL)
    return file


def test_there_is_a_statement_for_what_is_alike(path: Path) -> None:
    operation = load_operation(path, "postgres", {})
    (statement,) = operation.statements
    assert statement == (
        "SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::text[]) "
        "WITH ORDINALITY AS given(job_id, fence, size, note, n) WHERE queue = $5::text"
    )
    assert operation.for_alike == (
        "SELECT * FROM (SELECT own.*, $2::bigint AS fence, $4::text AS note FROM "
        "unnest(string_to_array($1::text, E'\\x1f'), $3::bigint[]) "
        "WITH ORDINALITY AS own(job_id, size, n)) AS given WHERE queue = $5::text"
    )


def test_sqlite_takes_every_batch_as_it_is(path: Path) -> None:
    assert load_operation(path, "sqlite", {}).for_alike == ""


def test_only_the_named_columns_have_to_be_alike(path: Path) -> None:
    operation = load_operation(path, "postgres", {})
    assert given(operation, [("a", 1, 5, "x"), ("b", 1, 6, "x")]) == (
        operation.for_alike,
        [f"a{SEPARATOR}b", 1, [5, 6], "x"],
    )
    assert given(operation, [("a", 1, 5, "x"), ("b", 2, 6, "x")]) == (
        operation.statements[0],
        [["a", "b"], [1, 2], [5, 6], ["x", "x"]],
    )


@pytest.mark.parametrize("ids", [("a", f"b{SEPARATOR}c"), (f"{SEPARATOR}",), ("",)])
def test_what_cannot_be_joined_goes_as_an_array(path: Path, ids: tuple[str, ...]) -> None:
    operation = load_operation(path, "postgres", {})
    statement, columns = given(operation, [(each, 1, 5, "x") for each in ids])
    assert statement == operation.statements[0]
    assert columns[0] == list(ids)


def test_the_common_end_of_a_job_has_the_short_form() -> None:
    operation = PostgresEngine("postgresql://nowhere/none").operation(INBOX, "complete")
    assert operation.alike == {"fence", "result", "result_h"}
