"""Batches of statements: as arrays, and in the short form where most of a batch is alike."""

import pytest

from tenure.core.errors import UsageError
from tenure.sql.engine import INBOX
from tenure.sql.operations import SEPARATOR, Operations, make_operation
from tenure.sql.postgres_engine import PostgresEngine, given

SQL = """-- Ends things.
-- Batch: job_id text, fence bigint, size bigint, note text
-- Alike: fence, note
-- Takes: queue text
SELECT * FROM {batch} WHERE queue = :queue
"""


def test_there_is_a_statement_for_what_is_alike() -> None:
    operation = make_operation("end", SQL, "postgres", {})
    (statement,) = operation.statements
    assert statement == (
        "SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::text[]) "
        "WITH ORDINALITY AS given(job_id, fence, size, note, n) WHERE queue = $5::text"
    )
    assert operation.for_alike[0] == (
        "SELECT * FROM (SELECT own.*, $2::bigint AS fence, $4::text AS note FROM "
        "unnest(string_to_array($1::text, E'\\x1f'), $3::bigint[]) "
        "WITH ORDINALITY AS own(job_id, size, n)) AS given WHERE queue = $5::text"
    )


def test_sqlite_takes_parameters_for_what_is_alike() -> None:
    (statement,) = make_operation("end", SQL, "sqlite", {}).for_alike
    assert statement == (
        "SELECT * FROM (SELECT *, :fence AS fence, :note AS note FROM (SELECT key + 1 AS n, "
        "json_extract(value, '$[0]') AS job_id, json_extract(value, '$[1]') AS size "
        "FROM json_each(:batch))) WHERE queue = :queue;"
    )


def test_only_the_named_columns_have_to_be_alike() -> None:
    operation = make_operation("end", SQL, "postgres", {})
    assert given(operation, [("a", 1, 5, "x"), ("b", 1, 6, "x")]) == (
        operation.for_alike[0],
        [f"a{SEPARATOR}b", 1, [5, 6], "x"],
    )
    assert given(operation, [("a", 1, 5, "x"), ("b", 2, 6, "x")]) == (
        operation.statements[0],
        [["a", "b"], [1, 2], [5, 6], ["x", "x"]],
    )


@pytest.mark.parametrize("ids", [("a", f"b{SEPARATOR}c"), (f"{SEPARATOR}",), ("",)])
def test_what_cannot_be_joined_goes_as_an_array(ids: tuple[str, ...]) -> None:
    operation = make_operation("end", SQL, "postgres", {})
    statement, columns = given(operation, [(each, 1, 5, "x") for each in ids])
    assert statement == operation.statements[0]
    assert columns[0] == list(ids)


def test_a_batch_of_completes_has_the_short_form() -> None:
    operation = PostgresEngine("postgresql://nowhere/none").operation(INBOX, "settle")
    completes = [
        (f"j{n}", 1, "t", "complete", 0, True, "", "h", "", "", "", "t:c:h") for n in (1, 2)
    ]
    assert given(operation, completes)[0] == operation.for_alike[0]


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
