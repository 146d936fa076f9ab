"""What the inbox and the control plane share: jobs, leases and a journal in SQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenure.core.errors import UsageError
from tenure.sql.engine import Engine


def open_engine(url: str, settings: Mapping[str, Any]) -> Engine:
    """The engine behind a store URL, `sqlite:///file` or `postgresql://...`; connects when used."""
    scheme = url.partition("://")[0]
    if scheme in ("postgresql", "postgres"):
        from tenure.sql.postgres_engine import PostgresEngine

        return PostgresEngine(url, **settings)
    if scheme in ("sqlite", "libsql"):
        _check_no_options(url)
        from tenure.sql.sqlite_engine import SqliteEngine

        return SqliteEngine(url, **settings)
    raise UsageError(
        f"{scheme}:// is no SQL store; write sqlite:///jobs.db or postgresql://user@host/database"
    )


def _check_no_options(url: str) -> None:
    """Refuse an option that would be ignored: a SQLite file has none."""
    unknown = url.partition("?")[2].partition("=")[0]
    if unknown:
        raise UsageError(
            f"unknown option {unknown!r} in the queue URL: neither the contract has one of that "
            "name nor a SQLite file; docs/contracts lists those there are"
        )
