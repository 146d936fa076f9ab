"""A libsql client that looks like `sqlite3.Connection`, for `libsql:///file.db`.

libsql's Python client has no named parameters, no rows with names and no functions of ours, makes
floats of integers above 32 bits, and raises `ValueError` for everything. This adapter adds what the
ledger's statements need.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tenure.core.errors import UsageError

_NAMED = re.compile(r"(?<![:\w\"]):([a-z_]+)\b")
_REFUSALS = ("constraint", "transition:")


class LibsqlConnection:
    """As much of `sqlite3.Connection` as the store uses."""

    def __init__(self, path: Path, busy_ms: int) -> None:
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
        """Runs one statement, with parameters by name or by position."""
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
        places = {name: at for at, name in enumerate(columns)}
        self._rows = [_NamedRow(places, row) for row in rows]

    def fetchall(self) -> list[_NamedRow]:
        return self._rows

    def fetchone(self) -> _NamedRow | None:
        return self._rows[0] if self._rows else None

    def __iter__(self) -> Iterator[_NamedRow]:
        return iter(self._rows)


class _NamedRow:
    """A row that is read by name or by position."""

    __slots__ = ("_places", "_values")

    def __init__(self, places: Mapping[str, int], values: Sequence[Any]) -> None:
        self._places = places
        self._values = values

    def __getitem__(self, key: int | str) -> Any:
        return self._values[self._places[key] if isinstance(key, str) else key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> list[str]:
        return list(self._places)


@lru_cache(maxsize=1_000)
def _positional(statement: str, numbers: frozenset[str]) -> tuple[str, tuple[str, ...]]:
    names: list[str] = []

    def place(match: re.Match[str]) -> str:
        name = match[1]
        if name not in names:
            names.append(name)
        at = f"?{names.index(name) + 1}"
        return f"CAST({at} AS INTEGER)" if name in numbers else at

    # It has no functions of ours; bytes travel as hex, which it can decode itself.
    return _NAMED.sub(place, statement).replace("from_base64(", "unhex("), tuple(names)


def in_hex(batch: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """A batch with its bytes as hex, for a client without functions of ours."""
    return [[one.hex() if isinstance(one, bytes) else one for one in row] for row in batch]
