"""SQL operations: named statements in files, made ready for SQLite or PostgreSQL."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tenure.core.errors import UsageError
from tenure.store.beside import folder_beside

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

Dialect = Literal["postgres", "sqlite"]
SEPARATOR = "\x1f"

_COLUMN = re.compile(r"([a-z_]+) ([a-z]+(?:\[\])?)")
_PARAMETER = re.compile(r"(?<![:\w\"]):([a-z_]+)\b")
_WORD = re.compile(r"\{([a-z_]+)\}")
_ALIKE = re.compile(r"^-- Alike: (.*)$", re.MULTILINE)
_LOOP = re.compile(r"^-- @for (\w+) in ([\w ]+)\n(.*?)^-- @end$", re.MULTILINE | re.DOTALL)
_STORE_GIVES = {"sqlite": frozenset({"batch", "now_ms"}), "postgres": frozenset[str]()}


@dataclass(frozen=True, slots=True)
class Operation:
    """One transaction: its statements, and its parameters in the order in which they are given."""

    name: str
    batch: tuple[str, ...]
    takes: tuple[str, ...]
    statements: tuple[str, ...] = field(repr=False)
    alike: frozenset[str] = frozenset()
    for_alike: str = field(default="", repr=False)


class Operations(dict[str, Operation]):
    """The operations of a package's `sql/<dialect>` folder, each read when it is first asked for.

    Those of its folder `session` belong to one dialect alone. `claim+share` is the file of `claim`
    with the fragment `share` as its `in_turn`.
    """

    def __init__(self, package: str, dialect: Dialect, words: Mapping[str, str]) -> None:
        self._folder = folder_beside(package, "sql", dialect)
        self._dialect = dialect
        self._words = words

    def __missing__(self, name: str) -> Operation:
        file, _, variant = name.partition("+")
        path = self._folder / f"{file}.sql"
        if not path.is_file():
            path = self._folder / "session" / f"{file}.sql"
        words = {**self._words, "in_turn": self._words[variant]} if variant else self._words
        self[name] = operation = load_operation(path, self._dialect, words)
        return operation


def load_operation(path: Traversable, dialect: Dialect, words: Mapping[str, str]) -> Operation:
    """One file, made ready for its dialect."""
    text = path.read_text(encoding="utf-8")
    batch, takes = header_columns(text, "Batch"), header_columns(text, "Takes")
    alike = frozenset(name for line in _ALIKE.findall(text) for name in line.split(", "))

    def body_with(batch_source: str) -> str:
        own = {**words, "batch": batch_source}
        return _WORD.sub(lambda match: _given(own, match[1], path.name), without_comments(text))

    body, for_alike = body_with(_batch_source(dialect, batch)), ""
    used = set(_PARAMETER.findall(body)) - _STORE_GIVES[dialect]
    if used - {column for column, _ in takes}:
        raise UsageError(f"{path.name}: uses {sorted(used)}, its header takes {dict(takes)}")
    if dialect == "sqlite":
        statements = split(body)
    else:
        statements = [_numbered(body, batch, takes)]
        if alike:
            for_alike = _numbered(body_with(_alike_source(batch, alike)), batch, takes)
    return Operation(
        name=path.name.removesuffix(".sql"),
        batch=tuple(column for column, _ in batch),
        takes=tuple(column for column, _ in takes),
        statements=tuple(statements),
        alike=alike,
        for_alike=for_alike,
    )


def header_columns(text: str, part: str) -> list[tuple[str, str]]:
    """What the header's lines `Batch:` or `Takes:` list: names and types."""
    lines = re.findall(rf"^-- {part}: (.*)$", text, re.MULTILINE)
    return [column for line in lines for column in _COLUMN.findall(line)]


def load_migrations(package: str, dialect: Dialect) -> list[tuple[int, str, str]]:
    """The numbered migrations of a package: number, name, text with its loops unrolled."""
    folder = folder_beside(package, "sql", dialect, "migrations")
    found = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".sql"):
            number, _, name = entry.name.removesuffix(".sql").partition("_")
            found.append((int(number), name, unrolled(entry.read_text(encoding="utf-8"))))
    return found


def unrolled(text: str) -> str:
    """What stands between `-- @for box in a b` and `-- @end`, once for each word."""

    def each(match: re.Match[str]) -> str:
        variable, words, body = match.groups()
        return "".join(body.replace(f"{{{variable}}}", word) for word in words.split())

    return _LOOP.sub(each, text)


def split(text: str) -> list[str]:
    """The single statements of a text; a trigger's body stays whole."""
    statements, part = [], ""
    for piece in text.split(";"):
        part += piece + ";"
        if sqlite3.complete_statement(part):
            if part.strip(" \n;"):
                statements.append(part.strip())
            part = ""
    return statements


def without_comments(text: str) -> str:
    """The statements of a file, bare."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("--")]
    return "\n".join(lines).strip()


def _given(words: Mapping[str, str], word: str, file: str) -> str:
    if word not in words:
        raise UsageError(f"{file}: {{{word}}} is not one of {', '.join(sorted(words))}")
    return words[word]


def _batch_source(dialect: Dialect, columns: Iterable[tuple[str, str]]) -> str:
    names = [name for name, _ in columns]
    if dialect == "sqlite":
        parts = [f"json_extract(value, '$[{at}]') AS {name}" for at, name in enumerate(names)]
        return f"(SELECT key + 1 AS n, {', '.join(parts)} FROM json_each(:batch))"  # nosec B608 # our own words
    arrays = ", ".join(f"${at}::{kind}[]" for at, (_, kind) in enumerate(columns, 1))
    return f"unnest({arrays}) WITH ORDINALITY AS given({', '.join(names)}, n)"


def _alike_source(columns: Iterable[tuple[str, str]], alike: Set[str]) -> str:
    """The batch where each of some columns has one value for all rows, and texts are joined."""
    single, arrays, own = [], [], []
    for at, (name, kind) in enumerate(columns, 1):
        if name in alike:
            single.append(f"${at}::{kind} AS {name}")
        else:
            own.append(name)
            text = f"string_to_array(${at}::text, E'\\x{ord(SEPARATOR):02x}')"
            arrays.append(text if kind == "text" else f"${at}::{kind}[]")
    rows = f"unnest({', '.join(arrays)}) WITH ORDINALITY AS own({', '.join(own)}, n)"
    return f"(SELECT own.*, {', '.join(single)} FROM {rows}) AS given"  # nosec B608 # our own words


def _numbered(body: str, batch: list[tuple[str, str]], takes: list[tuple[str, str]]) -> str:
    """Positions instead of names; each with its type, so that the server need not guess."""
    at = {name: f"${number}::{kind}" for number, (name, kind) in enumerate(takes, len(batch) + 1)}
    return _PARAMETER.sub(lambda match: at[match[1]], body)
