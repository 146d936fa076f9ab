"""The history page: hourly figures and audit results, read from the files of the lake.

This needs no Spark: the manifest of the tables and the state of the audit are JSON, and pyarrow, if
installed, reads the Parquet tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tenure.core.errors import UsageError

_DAYS_MAX = 14
_HOURS_MAX = 168
_SUMMED = ("submitted", "completed", "retried", "dead", "lost")
_LARGEST = ("p95_wait_ms", "p95_run_ms")


class Hour(msgspec.Struct, kw_only=True):
    """One hour of one queue. Times are the maximum of its tasks and workers, in milliseconds."""

    hour_ms: int
    contract: str
    queue: str
    submitted: int = 0
    completed: int = 0
    retried: int = 0
    dead: int = 0
    lost: int = 0
    p95_wait_ms: float = 0.0
    p95_run_ms: float = 0.0


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """One invariant and its result in the last audit."""

    invariant: str
    text: str = ""
    jobs: int = 0
    violations: int = 0


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a lake. `missing` says why a part of it cannot be shown."""

    lake: str
    hours: list[Hour] = []
    verdicts: list[Audited] = []
    gaps: int = 0
    missing: str = ""


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, dict[str, list[str]]] = {}


class _AuditTotal(msgspec.Struct, frozen=True):
    verdicts: list[Audited] = []


class _AuditState(msgspec.Struct, frozen=True):
    total: _AuditTotal | None = None


def read_history(lake: str, *, queue: str = "") -> History:
    """Read the tables of a lake in a local folder. Blocking: call it in a thread."""
    folder = Path(lake)
    if not lake or "://" in lake:
        return History(lake=lake, missing="name a lake in a local folder: the setting gateway.lake")
    if not (folder / "lake.json").exists():
        missing = f"there is no lake in {lake} yet: tenure pipeline capture fills one"
        return History(lake=lake, missing=missing)
    audit = _json(folder / "audit" / "state.json", _AuditState())
    manifest = _json(folder / "tables" / "_manifest.json", _Manifest())
    by_day = manifest.files.get("metrics_hourly", {})
    newest = sorted(by_day, reverse=True)[:_DAYS_MAX]
    hours: list[Hour] = []
    missing = "" if by_day else "the lake has no tables yet: tenure pipeline tables makes them"
    try:
        hours = _hours(_rows([folder / path for day in newest for path in by_day[day]]), queue)
    except UsageError as error:
        missing = str(error)
    return History(
        lake=lake,
        hours=hours,
        verdicts=audit.total.verdicts if audit.total else [],
        gaps=len(list((folder / "gaps").glob("*.json"))),
        missing=missing,
    )


def _rows(paths: list[Path]) -> list[dict[str, Any]]:
    if not paths:
        return []
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise UsageError("pyarrow reads the tables; pip install 'tenure[history]'") from None
    # Each file separately: as a data set, the name of its folder would become a column.
    return [row for path in paths for row in parquet.ParquetFile(path).read().to_pylist()]


def _hours(rows: list[dict[str, Any]], queue: str) -> list[Hour]:
    found: dict[tuple[int, str, str], Hour] = {}
    for row in rows:
        if queue and queue not in (row["queue"], f"{row['contract']}:{row['queue']}"):
            continue
        key = (row["hour_ms"], row["contract"], row["queue"])
        hour = found.setdefault(key, Hour(hour_ms=key[0], contract=key[1], queue=key[2]))
        for name in _SUMMED:
            setattr(hour, name, getattr(hour, name) + int(row.get(name) or 0))
        for name in _LARGEST:
            setattr(hour, name, max(getattr(hour, name), float(row.get(name) or 0)))
    newest = sorted(found.values(), key=lambda hour: (-hour.hour_ms, hour.contract, hour.queue))
    return newest[:_HOURS_MAX]


def _json(path: Path, default: Any) -> Any:
    """The file as the type of `default`, or `default` if it is missing or of another version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type(default))
    except (OSError, msgspec.MsgspecError):
        return default
