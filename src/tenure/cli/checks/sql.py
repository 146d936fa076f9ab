"""An SQL store: the file or server behind a queue, before the queue itself is asked."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

from tenure.cli.checks.finding import Finding, judged
from tenure.cli.checks.redis import clock_finding

_FREE_BYTES_MIN = 1 << 30
_POSTGRES_OLDEST = 130_000
_OPEN_S_MAX = 300


def sqlite_findings(store: str) -> list[Finding]:
    """The file, its folder and its disk. A file that is not there yet is made on first use."""
    path = Path(store.partition("://")[2].removeprefix("/").partition("?")[0])
    folder = path.parent
    if not folder.is_dir():
        remedy = f"mkdir -p {folder}"
        return [Finding("problem", "folder", f"{folder} is not there", remedy)]
    free = shutil.disk_usage(folder).free
    found = [
        judged(
            "folder",
            f"{folder.absolute()} can be written"
            if os.access(folder, os.W_OK)
            else f"{folder.absolute()} cannot be written",
            bad=not os.access(folder, os.W_OK),
            remedy="SQLite writes its log beside the file: give this user the folder",
        ),
        judged(
            "disk",
            f"{free / (1 << 30):.1f} GB free",
            bad=free < _FREE_BYTES_MIN,
            level="note",
            remedy="a full disk stops every write: make room, or set keep_ms and journal_days",
        ),
    ]
    return [*found, *_file(path)] if path.exists() else found


def _file(path: Path) -> list[Finding]:
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
        try:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        remedy = "is it a database of this project? restore it from a copy, or name another"
        return [Finding("problem", "database file", f"{path}: {error}", remedy)]
    remedy = "it is set on the first write; on a network disk it cannot be: use a local one"
    return [judged("database file", f"{path}, log {mode}", bad=mode != "wal", remedy=remedy)]


async def postgres_findings(store: str) -> list[Finding]:
    """What the server says of itself; one that is away is one finding and ends it."""
    import asyncpg

    from tenure.store.postgres import connect_arguments

    try:
        connection = await asyncpg.connect(**connect_arguments(store, {}))
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        remedy = "start it, or correct user, host and database in the queue's URL"
        return [Finding("problem", "reachable", f"PostgreSQL: {error}", remedy)]
    try:
        before_ms = time.time() * 1000
        row = await connection.fetchrow(
            "SELECT current_setting('server_version_num')::int AS number,"
            " current_setting('server_version') AS version, current_setting('fsync') AS fsync,"
            " extract(epoch FROM clock_timestamp()) * 1000 AS now_ms,"
            " pg_is_in_recovery() AS replica, coalesce((SELECT max(extract(epoch FROM now() -"
            " xact_start)) FROM pg_stat_activity WHERE datname = current_database()), 0) AS open_s"
        )
        skew_ms = float(row["now_ms"]) - (before_ms + time.time() * 1000) / 2
    finally:
        await connection.close()
    return [*server_findings(dict(row)), clock_finding(skew_ms)]


def server_findings(row: dict[str, Any]) -> list[Finding]:
    """Version, durability, role, and transactions that hold everything back."""
    return [
        judged(
            "postgres version",
            row["version"],
            bad=row["number"] < _POSTGRES_OLDEST,
            remedy="upgrade to 13 or newer",
        ),
        judged(
            "fsync",
            row["fsync"],
            bad=row["fsync"] != "on",
            remedy="a crash may lose or break everything: ALTER SYSTEM SET fsync = on, then reload",
        ),
        judged(
            "role",
            "a replica" if row["replica"] else "primary",
            bad=row["replica"],
            remedy="a replica takes no writes: name the primary",
        ),
        judged(
            "open transactions",
            f"the oldest is {float(row['open_s']):.0f} s old",
            bad=float(row["open_s"]) > _OPEN_S_MAX,
            level="note",
            remedy="it holds back the journal and the clean-up: find it in pg_stat_activity",
        ),
    ]
