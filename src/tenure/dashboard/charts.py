"""The data of charts and of the history page.

The macros of `templates/charts.html` draw timelines, sparklines and heat maps as SVG. The history
page shows hourly figures and audit results from the files of the lake. This needs no Spark: the
manifest of the tables and the state of the audit are JSON, and pyarrow, if installed, reads the
Parquet tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tenure.core.errors import UsageError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.portable import State, state_of
from tenure.dashboard.display import decode_json, duration
from tenure.dashboard.queues import event_state
from tenure.dashboard.watch import WINDOW_S, Second, bucket_ms

_BANDS_MS = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
_COLUMNS = 60
_SPARK_W, _SPARK_H = 120, 24

Phase = Literal["wait", "run", "backoff"]
_PHASES: dict[Phase, str] = {"wait": "waited", "run": "ran", "backoff": "rested"}
_ATTEMPTS_SHOWN = 200
_MS_DIGITS_MAX = 15
_BY_STEP: dict[str, State] = {"retry": "waiting", "fail": "failed"}
_ENDS: tuple[State, ...] = ("done", "failed", "cancelled")

_DAYS_MAX = 14
_HOURS_MAX = 168
_SUMMED = ("submitted", "completed", "retried", "dead", "lost")
_LARGEST = ("p95_wait_ms", "p95_run_ms")


class Segment(msgspec.Struct, frozen=True):
    """One phase of an attempt; `open` if it has not ended."""

    phase: Phase
    from_ms: int
    to_ms: int
    open: bool = False

    @property
    def text(self) -> str:
        """Such as "ran 3 s so far"."""
        took = duration(self.to_ms - self.from_ms)
        return f"{_PHASES[self.phase]} {took}{' so far' if self.open else ''}"


class AttemptBar(msgspec.Struct, frozen=True):
    """One attempt: the wait before it, the run, and how it ended ("" while it runs)."""

    number: int
    segments: tuple[Segment, ...]
    end: State | Literal["retry", ""] = ""
    worker: str = ""


class Timeline(msgspec.Struct, frozen=True):
    """The last attempts of a job and their time span; `earlier` is the number of older ones.

    `partial` is true if the job has no events.
    """

    attempts: tuple[AttemptBar, ...]
    from_ms: int
    to_ms: int
    partial: bool = False
    earlier: int = 0

    @property
    def total(self) -> int:
        """The number of attempts in the events."""
        return self.earlier + len(self.attempts)


def timeline(job: JobRecord, events: Sequence[JobEvent], *, now_ms: int) -> Timeline:
    """The timeline from the events of a job of any contract; without events, from the record."""
    builder = _Builder(job)
    for event in events:
        # A failed attempt may rest in a state of its own: the step says what becomes of it.
        state = _BY_STEP.get(event.step) or event_state(job.contract, event.type)
        if state is not None:
            builder.step(state, event)
    return builder.finish(now_ms)


class _Builder:
    """Builds a timeline in one pass over the events."""

    def __init__(self, job: JobRecord) -> None:
        self._job = job
        self._attempts: list[AttemptBar] = []
        self._segments: list[Segment] = []
        self._phase: Phase = "wait"
        self._since_ms = job.created_ms
        self._worker = ""
        self._runs = 0
        self._has_events = False
        self._ended = False

    def step(self, state: State, event: JobEvent) -> None:
        ts_ms = event.ts_ms or self._since_ms
        self._has_events = True
        if state == "running":
            if self._phase == "run":
                return  # a stage within the same attempt
            self._close(ts_ms)
            self._phase = "run"
            self._worker = _worker_in(event)
        elif self._phase == "run":
            self._end_attempt(ts_ms, state, event)
        elif state in _ENDS:
            if not self._ended:  # two events may report the same failure
                self._close(ts_ms)
            self._ended = True
        elif self._ended:  # an operator sent it back
            self._phase, self._since_ms, self._ended = "wait", ts_ms, False

    def finish(self, now_ms: int) -> Timeline:
        state = state_of(self._job)
        over = state in _ENDS
        until_ms = self._job.updated_ms if over and self._job.updated_ms else now_ms
        if not over:
            self._close(max(until_ms, self._since_ms), still=True)
        elif self._phase == "run" and not self._ended:  # the final event is not kept
            self._close(max(until_ms, self._since_ms))
        if self._segments:
            self._attempts.append(self._attempt(state if over else ""))
        shown = self._attempts[-_ATTEMPTS_SHOWN:]
        spans = [segment for attempt in shown for segment in attempt.segments]
        first = min((segment.from_ms for segment in spans), default=self._job.created_ms)
        last = max((segment.to_ms for segment in spans), default=until_ms)
        earlier = len(self._attempts) - len(shown)
        return Timeline(tuple(shown), first, max(last, first + 1), not self._has_events, earlier)

    def _end_attempt(self, ts_ms: int, state: State, event: JobEvent) -> None:
        self._close(ts_ms)
        if state in _ENDS:
            self._attempts.append(self._attempt(state))
            self._ended, self._phase, self._since_ms = True, "wait", ts_ms
            return
        self._attempts.append(self._attempt("retry"))
        due_ms = _due_in(event)
        if due_ms > ts_ms:
            self._segments.append(Segment("backoff", ts_ms, due_ms))
            ts_ms = due_ms
        self._phase, self._since_ms = "wait", ts_ms

    def _close(self, ts_ms: int, *, still: bool = False) -> None:
        if self._segments and self._segments[-1].phase == "backoff":
            backoff = self._segments[-1]
            if ts_ms < backoff.to_ms:  # retried early, or still in backoff
                self._segments[-1] = Segment("backoff", backoff.from_ms, ts_ms, still)
                self._since_ms = ts_ms
                return
        if ts_ms > self._since_ms or self._phase == "run":
            self._segments.append(Segment(self._phase, self._since_ms, ts_ms, still))
        self._since_ms = ts_ms

    def _attempt(self, end: Any) -> AttemptBar:
        self._runs += any(segment.phase == "run" for segment in self._segments)
        made = AttemptBar(self._runs, tuple(self._segments), end, self._worker)
        self._segments, self._worker = [], ""
        return made


def _worker_in(event: JobEvent) -> str:
    data = decode_json(event.data)
    names = ("worker", "workerId", "worker_id") if isinstance(data, dict) else ()
    return next((str(data[name]) for name in names if data.get(name)), "")


def _due_in(event: JobEvent) -> int:
    data = decode_json(event.data)
    for name in ("due_ms", "delay", "retry_at_ms") if isinstance(data, dict) else ():
        text = str(data.get(name, ""))
        if text.isdecimal() and len(text) <= _MS_DIGITS_MAX and int(text) > event.ts_ms:
            return int(text)
    return 0


def sparkline(rows: Sequence[tuple[float, float]], *, now_s: float) -> str:
    """The points of a line over (time, value) pairs of the last 15 minutes, in 60 mean values."""
    cells: list[list[float]] = [[] for _ in range(_COLUMNS)]
    for at_s, value in rows:
        cell = int((at_s - (now_s - WINDOW_S)) / WINDOW_S * _COLUMNS)
        if 0 <= cell < _COLUMNS:
            cells[cell].append(value)
    values = [sum(cell) / len(cell) if cell else 0.0 for cell in cells]
    most = max(values) or 1
    step = _SPARK_W / (_COLUMNS - 1)
    return " ".join(
        f"{at * step:.1f},{_SPARK_H - 2 - value / most * (_SPARK_H - 4):.1f}"
        for at, value in enumerate(values)
    )


class HeatMap(msgspec.Struct, frozen=True):
    """Numbers of jobs by time and duration. A cell is (column, row, level 1 to 6, text)."""

    verb: str
    jobs: int
    cells: list[tuple[int, int, int, str]]
    labels: list[tuple[int, str]]


def heat_map(seconds: Iterable[Second], kind: Literal["wait", "run"], *, now_s: int) -> HeatMap:
    """How long jobs waited or ran (`kind`) in the last 15 minutes."""
    counts: Counter[tuple[int, int]] = Counter()
    for second in seconds:
        column = (second.at_s - (now_s - WINDOW_S)) * _COLUMNS // WINDOW_S
        if 0 <= column < _COLUMNS:
            for bucket, count in getattr(second, kind).items():
                band = sum(bucket_ms(bucket) > bound for bound in _BANDS_MS)
                counts[(column, band)] += count
    most = max(counts.values(), default=1)
    last = len(_BANDS_MS)
    cells = [
        (
            column,
            last - band,
            min(6, 1 + int(5 * (count / most) ** 0.5)),
            f"{count} jobs {_band_text(band)}",
        )
        for (column, band), count in sorted(counts.items())
    ]
    labels = [(last - band, duration(_BANDS_MS[band])) for band in range(0, last, 2)]
    return HeatMap(_PHASES[kind], counts.total(), cells, labels)


def _band_text(band: int) -> str:
    if band == 0:
        return f"up to {duration(_BANDS_MS[0])}"
    if band == len(_BANDS_MS):
        return f"over {duration(_BANDS_MS[-1])}"
    return f"between {duration(_BANDS_MS[band - 1])} and {duration(_BANDS_MS[band])}"


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


class InvariantResult(msgspec.Struct, frozen=True, kw_only=True):
    """One invariant and its result in the last audit."""

    invariant: str
    text: str = ""
    jobs: int = 0
    violations: int = 0


class LakeHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a lake. `missing` says why a part of it cannot be shown."""

    lake: str
    hours: list[Hour] = []
    verdicts: list[InvariantResult] = []
    gaps: int = 0
    missing: str = ""


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, dict[str, list[str]]] = {}


class _AuditTotal(msgspec.Struct, frozen=True):
    verdicts: list[InvariantResult] = []


class _AuditState(msgspec.Struct, frozen=True):
    total: _AuditTotal | None = None


def read_history(lake: str, *, queue: str = "") -> LakeHistory:
    """Read the tables of a lake in a local folder. Blocking: call it in a thread."""
    folder = Path(lake)
    if not lake or "://" in lake:
        return LakeHistory(
            lake=lake, missing="name a lake in a local folder: the setting gateway.lake"
        )
    if not (folder / "lake.json").exists():
        missing = f"there is no lake in {lake} yet: tenure pipeline capture fills one"
        return LakeHistory(lake=lake, missing=missing)
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
    return LakeHistory(
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
