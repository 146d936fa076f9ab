"""Named statements: their batches and their fragments."""

import pytest

from tenure.core.errors import UsageError
from tenure.sql.operations import Operations, make_operation

SQL = """-- Ends things.
-- Batch: job_id text, fence bigint
-- Takes: queue text
SELECT * FROM {batch} WHERE queue = :queue
"""


def test_postgresql_takes_a_batch_as_arrays() -> None:
    operation = make_operation("end", SQL, "postgres", {})
    (statement,) = operation.statements
    assert statement == (
        "SELECT * FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS given(job_id, fence, n) "
        "WHERE queue = $3::text"
    )


def test_postgresql_takes_equal_columns_as_one_value_at_the_same_position() -> None:
    sql = SQL.replace("-- Takes:", "-- Constant: fence\n-- Takes:")
    operation = make_operation("end", sql, "postgres", {})
    assert operation.with_constants == (
        "SELECT * FROM (SELECT *, $2::bigint AS fence FROM unnest($1::text[]) WITH ORDINALITY "
        "AS given(job_id, n)) AS requests WHERE queue = $3::text"
    )
    assert operation.statements == make_operation("end", SQL, "postgres", {}).statements


def test_sqlite_takes_a_batch_as_json() -> None:
    operation = make_operation("end", SQL, "sqlite", {})
    (statement,) = operation.statements
    assert statement == (
        "SELECT * FROM (SELECT key + 1 AS n, json_extract(value, '$[0]') AS job_id, "
        "json_extract(value, '$[1]') AS fence FROM json_each(:batch)) WHERE queue = :queue;"
    )


def test_a_fragment_takes_arguments_and_other_fragments() -> None:
    fragments = {"pair": "{left} = {right}", "right": "b.id"}
    operation = make_operation(
        "x", "SELECT {pair: left=f(a, b); right=c}, {right}", "postgres", fragments
    )
    assert operation.statements == ("SELECT f(a, b) = c, b.id",)


def test_an_unknown_fragment_is_named() -> None:
    with pytest.raises(UsageError, match=r"x: {none} is not one of"):
        make_operation("x", "SELECT {none}", "sqlite", {})


def test_a_fragment_may_have_a_variant_for_one_table() -> None:
    inbox, plane = Operations("postgres", "inbox_jobs"), Operations("postgres", "plane_jobs")
    assert "INSERT INTO job_outbox_events" in inbox["settle"].statements[0]
    assert "INSERT INTO job_outbox_events" not in plane["settle"].statements[0]
