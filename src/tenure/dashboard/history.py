"""What the pipeline made of the past: hourly figures and audits, read from the lake's own files.

No JVM and no Spark: the list of the tables' files is JSON, the tables are Parquet (pyarrow reads
them, where it is installed), the state of the audit is JSON.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from tenure.core.errors import UsageError

DAYS_MAX = 14
_HOURS_SHOWN = 168


class Hour(msgspec.Struct, kw_only=True):
    """One hour of one queue. Times are the longest of its tasks and workers, in milliseconds."""

    hour_ms: int
    contract: str
    queue: str
    submitted: int = 0
    attempts: int = 0
    completed: int = 0
    retried: int = 0
    dead: int = 0
    lost: int = 0
    jobs: int = 0
    p95_wait_ms: float = 0.0
    p95_run_ms: float = 0.0


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """One invariant and what the last audit said of it."""

    invariant: str
    text: str = ""
    contracts: str = ""
    jobs: int = 0
    violations: int = 0
    unobserved: int = 0


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """The history as the page shows it. `missing` says why a part of it is not there."""

    lake: str
    hours: list[Hour] = []
    days: list[str] = []
    verdicts: list[Audited] = []
    audit: dict[str, Any] = {}
    gaps: int = 0
    missing: str = ""


class _Manifest(msgspec.Struct, frozen=True):
    """The part of the tables' list that is needed here."""

    files: dict[str, dict[str, list[str]]] = {}


class _AuditState(msgspec.Struct, frozen=True):
    """The part of the audit's state that is needed here."""

    total: dict[str, Any] | None = None


def read_past(lake: str, *, queue: str = "", days: int = DAYS_MAX) -> Past:
    """Read the tables of a lake in a local folder; blocking, so call it in a thread."""
    folder = Path(lake)
    if not lake or "://" in lake:
        return Past(lake=lake, missing="name a lake in a local folder: the setting gateway.lake")
    if not (folder / "lake.json").exists():
        return Past(
            lake=lake,
            missing=f"there is no lake in {lake} yet: tenure pipeline capture fills one",
        )
    audit, verdicts = _audit(folder)
    gaps = len(list((folder / "gaps").glob("*.json")))
    past = Past(lake=lake, audit=audit, verdicts=verdicts, gaps=gaps)
    manifest = _json(folder / "tables" / "_manifest.json", _Manifest)
    by_day = manifest.files.get("metrics_hourly", {}) if manifest else {}
    if not by_day:
        return msgspec.structs.replace(
            past, missing="the lake has no tables yet: tenure pipeline tables makes them"
        )
    newest = sorted(by_day, reverse=True)[:days]
    try:
        rows = _rows([folder / path for day in newest for path in by_day[day]])
    except UsageError as error:
        return msgspec.structs.replace(past, missing=str(error))
    return msgspec.structs.replace(past, hours=_hours(rows, queue), days=newest)


def _rows(paths: list[Path]) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise UsageError("pyarrow reads the tables; pip install 'tenure[history]'") from None
    rows: list[dict[str, Any]] = []
    for path in paths:
        # One file, not a data set: the name of its folder is no column of the table.
        rows += parquet.ParquetFile(path).read().to_pylist()
    return rows


def _hours(rows: list[dict[str, Any]], queue: str) -> list[Hour]:
    found: dict[tuple[int, str, str], Hour] = {}
    for row in rows:
        if queue and queue not in (row["queue"], f"{row['contract']}:{row['queue']}"):
            continue
        key = (row["hour_ms"], row["contract"], row["queue"])
        hour = found.setdefault(key, Hour(hour_ms=key[0], contract=key[1], queue=key[2]))
        for name in ("submitted", "attempts", "completed", "retried", "dead", "lost", "jobs"):
            setattr(hour, name, getattr(hour, name) + int(row.get(name) or 0))
        for name in ("p95_wait_ms", "p95_run_ms"):
            setattr(hour, name, max(getattr(hour, name), float(row.get(name) or 0)))
    newest = sorted(found.values(), key=lambda hour: (-hour.hour_ms, hour.contract, hour.queue))
    return newest[:_HOURS_SHOWN]


def _audit(folder: Path) -> tuple[dict[str, Any], list[Audited]]:
    """What the audits of the lake have come to: numbers, and a verdict an invariant."""
    state = _json(folder / "audit" / "state.json", _AuditState)
    if state is None or state.total is None:
        return {}, []
    try:
        verdicts = msgspec.convert(state.total.get("verdicts", []), list[Audited])
    except msgspec.ValidationError:  # a pipeline of another version wrote it
        verdicts = []
    return {k: v for k, v in state.total.items() if isinstance(v, int)}, verdicts


def _json(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


class Histories:
    """Keeps what was read for a while: the files change only with a run of the pipeline."""

    def __init__(self, lake: str) -> None:
        self.lake = lake
        self._kept: dict[str, tuple[float, Past]] = {}

    async def read(self, queue: str) -> Past:
        """The past of a queue, or of all; at most five seconds old."""
        import asyncio

        at, past = self._kept.get(queue, (float("-inf"), Past(lake=self.lake)))
        if time.monotonic() - at > 5:
            past = await asyncio.to_thread(read_past, self.lake, queue=queue)
            if len(self._kept) > 100:
                self._kept.clear()
            self._kept[queue] = (time.monotonic(), past)
        return past
