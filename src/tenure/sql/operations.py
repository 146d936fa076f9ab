"""SQL operations: named statements in files, made ready for SQLite or PostgreSQL.

`statements/<dialect>/<subject>.sql` holds named statements, with the same names and parameters in
both dialects (but for `engine_only.sql`). Each statement begins with a header:

    -- name: extend
    -- What it does.
    -- Batch: job_id text, fence bigint     columns of a list of rows, read as `{batch}`
    -- Constant: fence                      batch columns whose value is often the same in all rows
    -- Takes: queue text, count integer     single parameters, read as `:queue`
    -- Returns: what comes back             -- Clauses: clauses of the contract that it serves

An operation is one transaction. `{jobs}` is the table of jobs. Every other word in braces is a
fragment of `fragments.sql`; `{write_events: moved=taken}` includes a fragment with arguments.

PostgreSQL gets one statement with `$1` and an array per batch column. If each `Constant` column has
the same value in all rows of a batch, it gets that value instead of an array, because every element
costs time on both sides (inbox with events: without this the CPU time per job is 1.2 times as high,
2026-11-18). SQLite gets its statements one by one and the batch as one JSON text.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from tenure.core.errors import UsageError
from tenure.store.files import package_folder

PACKAGE = "tenure.sql"
Dialect = Literal["postgres", "sqlite"]

_NAME = re.compile(r"^-- name: ([a-z_]+)(?: \[([a-z_]+)\])?\n", re.MULTILINE)
_FRAGMENT = re.compile(r"\{([a-z_]+)(?:: ([^{}]+))?\}")
_CONSTANT = re.compile(r"^-- Constant: (.*)$", re.MULTILINE)
_COLUMN = re.compile(r"([a-z_]+) ([a-z]+(?:\[\])?)")
_PARAMETER = re.compile(r"(?<![:\w\"]):([a-z_]+)\b")
_STORE_PARAMETERS = {"sqlite": frozenset({"batch", "now_ms"}), "postgres": frozenset[str]()}


@dataclass(frozen=True, slots=True)
class Operation:
    """One transaction: its statements, and the order of its parameters."""

    name: str
    batch: tuple[str, ...]
    takes: tuple[str, ...]
    statements: tuple[str, ...] = field(repr=False)
    constant: frozenset[str] = frozenset()
    with_constants: str = field(default="", repr=False)


class Operations(dict[str, Operation]):
    """The operations on one job table, each made when it is first used.

    `claim+share` is the statement `claim` with the fragment `share` in place of `in_turn`.
    """

    def __init__(self, dialect: Dialect, table: str) -> None:
        self._dialect = dialect
        self._fragments = {"jobs": table}
        for name, variants in _sections(dialect, "fragments.sql").items():
            self._fragments[name] = _without_comments(variants.get(table, variants.get("", "")))

    def __missing__(self, name: str) -> Operation:
        base, _, variant = name.partition("+")
        fragments = self._fragments
        if variant:
            fragments = {**fragments, "in_turn": fragments[variant]}
        text = statement_text(self._dialect, base)
        self[name] = operation = make_operation(base, text, self._dialect, fragments)
        return operation


def statement_text(dialect: Dialect, name: str) -> str:
    """A named statement with its header."""
    return statement_texts(dialect)[name]


@cache
def statement_texts(dialect: Dialect) -> dict[str, str]:
    """All named statements of a dialect."""
    files = [file.name for file in package_folder(PACKAGE, "statements", dialect).iterdir()]
    return {
        name: variants[""]
        for file in sorted(files)
        if file.endswith(".sql") and file != "fragments.sql"
        for name, variants in _sections(dialect, file).items()
    }


@cache
def _sections(dialect: Dialect, file: str) -> dict[str, dict[str, str]]:
    """The named sections of a file: name, then table ("" for all tables), then text."""
    path = package_folder(PACKAGE, "statements", dialect) / file
    _, *parts = _NAME.split(path.read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = {}
    for name, table, text in _triples(parts):
        found.setdefault(name, {})[table or ""] = text.strip("\n")
    return found


def _triples(parts: list[str]) -> Iterator[tuple[str, str, str]]:
    return zip(parts[::3], parts[1::3], parts[2::3], strict=True)


def make_operation(
    name: str, text: str, dialect: Dialect, fragments: Mapping[str, str]
) -> Operation:
    """One named statement, made ready for its dialect."""
    batch, takes = header_columns(text, "Batch"), header_columns(text, "Takes")
    constant = frozenset(word for line in _CONSTANT.findall(text) for word in line.split(", "))
    bare = _without_comments(text)
    body = _filled(bare, {**fragments, "batch": _batch_source(dialect, batch)}, name)
    with_constants = _filled(bare, {**fragments, "batch": _constant_source(batch, constant)}, name)
    used = set(_PARAMETER.findall(body)) - _STORE_PARAMETERS[dialect]
    if used - {column for column, _ in takes}:
        raise UsageError(f"{name}: uses {sorted(used)}, its header takes {dict(takes)}")
    return Operation(
        name=name,
        batch=tuple(column for column, _ in batch),
        takes=tuple(column for column, _ in takes),
        statements=tuple(split(body)) if dialect == "sqlite" else (_numbered(body, batch, takes),),
        constant=constant,
        with_constants=_numbered(with_constants, batch, takes) if constant else "",
    )


def header_columns(text: str, part: str) -> list[tuple[str, str]]:
    """What the header's lines `Batch:` or `Takes:` list: names and types."""
    lines = re.findall(rf"^-- {part}: (.*)$", text, re.MULTILINE)
    return [column for line in lines for column in _COLUMN.findall(line)]


def split(text: str) -> list[str]:
    """The single statements of a text; a trigger's body stays whole."""
    statements, statement = [], ""
    for fragment in text.split(";"):
        statement += fragment + ";"
        if sqlite3.complete_statement(statement):
            if statement.strip(" \n;"):
                statements.append(statement.strip())
            statement = ""
    return statements


def _without_comments(text: str) -> str:
    """A text without its lines of comment."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("--")]
    return "\n".join(lines).strip()


def _filled(text: str, fragments: Mapping[str, str], statement: str) -> str:
    def fill(match: re.Match[str]) -> str:
        name, arguments = match.groups()
        if name not in fragments:
            raise UsageError(
                f"{statement}: {{{name}}} is not one of {', '.join(sorted(fragments))}"
            )
        given = [argument.split("=", 1) for argument in arguments.split("; ")] if arguments else []
        return _filled(fragments[name], {**fragments, **dict(given)}, statement)

    return _FRAGMENT.sub(fill, text)


def _batch_source(dialect: Dialect, columns: Sequence[tuple[str, str]]) -> str:
    names = [name for name, _ in columns]
    if dialect == "sqlite":
        parts = [f"json_extract(value, '$[{at}]') AS {name}" for at, name in enumerate(names)]
        return f"(SELECT key + 1 AS n, {', '.join(parts)} FROM json_each(:batch))"  # nosec B608 # our own words
    arrays = ", ".join(f"${at}::{kind}[]" for at, (_, kind) in enumerate(columns, 1))
    return f"unnest({arrays}) WITH ORDINALITY AS given({', '.join(names)}, n)"


def _constant_source(columns: Sequence[tuple[str, str]], constant: Collection[str]) -> str:
    """The batch of PostgreSQL with one value for each `Constant` column; positions are the same."""
    arrays, names, values = [], [], []
    for at, (name, kind) in enumerate(columns, 1):
        if name in constant:
            values.append(f"${at}::{kind} AS {name}")
        else:
            arrays.append(f"${at}::{kind}[]")
            names.append(name)
    source = f"unnest({', '.join(arrays)}) WITH ORDINALITY AS given({', '.join(names)}, n)"
    return f"(SELECT *, {', '.join(values)} FROM {source}) AS requests"  # nosec B608 # our own words


def _numbered(body: str, batch: list[tuple[str, str]], takes: list[tuple[str, str]]) -> str:
    """Replace names by positions with types, so that the server need not infer the types."""
    at = {name: f"${number}::{kind}" for number, (name, kind) in enumerate(takes, len(batch) + 1)}
    return _PARAMETER.sub(lambda match: at[match[1]], body)
