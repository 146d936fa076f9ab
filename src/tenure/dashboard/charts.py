"""The data of the pages' pictures: the timeline of a job, sparklines, heat maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from markupsafe import Markup

from tenure.core.job import JobEvent, JobRecord
from tenure.dashboard.display import decode_json, duration
from tenure.dashboard.queues import Kind, event_kind, kind_of
from tenure.dashboard.watch import BANDS_MS, Second, band_of

Phase = Literal["wait", "run", "backoff"]
_ENDS: tuple[Kind, ...] = ("done", "failed", "cancelled")


class Segment(msgspec.Struct, frozen=True):
    """One stretch of time; `open` when it is still going on."""

    phase: Phase
    from_ms: int
    to_ms: int
    open: bool = False


class Attempt(msgspec.Struct, frozen=True):
    """One attempt: what came before it, the run, and how it ended ("" while it runs)."""

    number: int
    segments: tuple[Segment, ...]
    end: Kind | Literal["retry", ""] = ""
    worker: str = ""


class Timeline(msgspec.Struct, frozen=True):
    """All attempts of a job, and the time they span. `partial` when the first events are gone."""

    attempts: tuple[Attempt, ...]
    from_ms: int
    to_ms: int
    partial: bool = False


def timeline(job: JobRecord, events: Sequence[JobEvent], *, now_ms: int) -> Timeline:
    """Read the story out of the events; without any, out of the record."""
    builder = _Builder(job)
    for event in events:
        # A job that will be tried again may rest in a state that elsewhere is an end.
        kind = "waiting" if event.step == "retry" else event_kind(event.type)
        if kind is not None:
            builder.step(kind, event)
    return builder.finish(now_ms)


class _Builder:
    """Goes through the events once."""

    def __init__(self, job: JobRecord) -> None:
        self._job = job
        self._attempts: list[Attempt] = []
        self._segments: list[Segment] = []
        self._phase: Phase = "wait"
        self._since_ms = job.created_ms
        self._worker = ""
        self._heard = False
        self._ended = False

    def step(self, kind: Kind, event: JobEvent) -> None:
        """The job became something else."""
        ts_ms = event.ts_ms or self._since_ms
        self._heard = True
        if kind == "running":
            if self._phase == "run":
                return  # a stage within the same attempt
            self._close(ts_ms)
            self._phase = "run"
            self._worker = _worker_in(event)
        elif self._phase == "run":
            self._end_attempt(ts_ms, kind, event)
        elif kind in _ENDS:
            if not self._ended:  # a failure that is decided a moment later is one end
                self._close(ts_ms)
            self._ended = True
        elif self._ended:  # an operator sent it back
            self._phase, self._since_ms, self._ended = "wait", ts_ms, False

    def finish(self, now_ms: int) -> Timeline:
        """The whole, up to now if the job is not over."""
        over = kind_of(self._job.state) in _ENDS
        until_ms = self._job.updated_ms if over and self._job.updated_ms else now_ms
        if not over:
            self._close(max(until_ms, self._since_ms), still=True)
        elif self._phase == "run" and not self._ended:  # its end was not told, or is no longer kept
            self._close(max(until_ms, self._since_ms))
        if self._segments:
            end: Any = kind_of(self._job.state) if over else ""
            self._attempts.append(self._attempt(end))
        spans = [segment for attempt in self._attempts for segment in attempt.segments]
        first = min((segment.from_ms for segment in spans), default=self._job.created_ms)
        last = max((segment.to_ms for segment in spans), default=until_ms)
        return Timeline(tuple(self._attempts), first, max(last, first + 1), not self._heard)

    def _end_attempt(self, ts_ms: int, kind: Kind, event: JobEvent) -> None:
        self._close(ts_ms)
        if kind in _ENDS:
            self._attempts.append(self._attempt(kind))
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
            if ts_ms < backoff.to_ms:  # brought forward, or still resting
                self._segments[-1] = Segment("backoff", backoff.from_ms, ts_ms, still)
                self._since_ms = ts_ms
                return
        if ts_ms > self._since_ms or self._phase == "run":
            self._segments.append(Segment(self._phase, self._since_ms, ts_ms, still))
        self._since_ms = ts_ms

    def _attempt(self, end: Any) -> Attempt:
        number = sum(any(s.phase == "run" for s in a.segments) for a in self._attempts)
        ran = any(segment.phase == "run" for segment in self._segments)
        made = Attempt(number + 1 if ran else number, tuple(self._segments), end, self._worker)
        self._segments, self._worker = [], ""
        return made


def _worker_in(event: JobEvent) -> str:
    data = decode_json(event.data)
    if not isinstance(data, dict):
        return ""
    return str(data.get("worker") or data.get("workerId") or data.get("worker_id") or "")


def _due_in(event: JobEvent) -> int:
    data = decode_json(event.data)
    if not isinstance(data, dict):
        return 0
    for key in ("due_ms", "delay", "retry_at_ms"):
        text = str(data.get(key, ""))
        if text.isdecimal() and int(text) > event.ts_ms:
            return int(text)
    return 0


_SPARK_W, _SPARK_H = 120, 24
_CELL_W, _CELL_H, _LEFT = 12, 14, 46
_COLUMNS, _ROWS = 60, len(BANDS_MS) + 1
_HEAT_W, _HEAT_H = _LEFT + _COLUMNS * _CELL_W, _ROWS * _CELL_H + 16
_BAR_W = 1000
_PHASES = {"wait": "waited", "run": "ran", "backoff": "rested"}

_SPARK = Markup(
    '<svg class="spark" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" '
    'aria-label="{label}"><polyline points="{points}"/></svg>'
)
_CELL = Markup(
    '<rect class="h{level}" x="{x}" y="{y}" width="{w}" height="{h}"><title>{text}</title></rect>'
)
_TEXT = Markup('<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>')
_HEAT = Markup(
    '<svg class="heat" viewBox="0 0 {w} {h}" role="img" '
    'aria-label="How long jobs {words}, last 15 minutes: {jobs} jobs">{body}</svg>'
)
_SEGMENT = Markup(
    '<rect class="{kind}" x="{x:.1f}" y="3" width="{w:.1f}" height="14" rx="2">'
    "<title>{text}</title></rect>"
)
_BAR = Markup(
    '<svg class="bar" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" '
    'aria-label="{words}">{body}</svg>'
)


def sparkline(values: Sequence[float], label: str) -> Markup:
    """A line over the values; a flat one for none."""
    most = max(values, default=0) or 1
    step = _SPARK_W / max(len(values) - 1, 1)
    points = " ".join(
        f"{at * step:.1f},{_SPARK_H - 2 - value / most * (_SPARK_H - 4):.1f}"
        for at, value in enumerate(values)
    )
    return _SPARK.format(w=_SPARK_W, h=_SPARK_H, label=label, points=points or f"0,{_SPARK_H - 2}")


def folded(
    rows: Sequence[tuple[float, float]], *, now_s: float, span_s: int = 900, cells: int = 60
) -> list[float]:
    """Values by time, folded into so many cells of equal length, as the mean of each."""
    sums, sizes = [0.0] * cells, [0] * cells
    for at_s, value in rows:
        cell = int((at_s - (now_s - span_s)) / span_s * cells)
        if 0 <= cell < cells:
            sums[cell] += value
            sizes[cell] += 1
    return [total / size if size else 0.0 for total, size in zip(sums, sizes, strict=True)]


def heat_map(seconds: Iterable[Second], kind: str, *, now_s: int, span_s: int = 900) -> Markup:
    """How long jobs waited or ran (`kind`), over time: darker means more jobs."""
    cells: Counter[tuple[int, int]] = Counter()
    for second in seconds:
        column = (second.at_s - (now_s - span_s)) * _COLUMNS // span_s
        if 0 <= column < _COLUMNS:
            for bucket, count in getattr(second, kind).items():
                cells[(column, band_of(bucket))] += count
    most = max(cells.values(), default=1)
    parts = [_cell(place, count, most) for place, count in sorted(cells.items())]
    words = "waited" if kind == "wait" else "ran"
    body = Markup("").join([*parts, *_scale()])
    return _HEAT.format(w=_HEAT_W, h=_HEAT_H, words=words, jobs=sum(cells.values()), body=body)


def _cell(place: tuple[int, int], count: int, most: int) -> Markup:
    column, band = place
    return _CELL.format(
        level=min(6, 1 + int(5 * (count / most) ** 0.5)),
        x=_LEFT + column * _CELL_W,
        y=(_ROWS - 1 - band) * _CELL_H,
        w=_CELL_W - 1,
        h=_CELL_H - 1,
        text=f"{count} jobs {_band_words(band)}",
    )


def _scale() -> list[Markup]:
    """What the rows and the two ends mean."""
    rows = [
        _TEXT.format(
            x=_LEFT - 5,
            y=(_ROWS - 1 - band) * _CELL_H + 4,
            anchor="end",
            text=duration(BANDS_MS[band]),
        )
        for band in range(0, len(BANDS_MS), 2)
    ]
    y = _HEAT_H - 3
    ends = [(_LEFT, "start", "15 min ago"), (_HEAT_W, "end", "now")]
    return [*rows, *(_TEXT.format(x=x, y=y, anchor=anchor, text=text) for x, anchor, text in ends)]


def _band_words(band: int) -> str:
    if band == 0:
        return f"up to {duration(BANDS_MS[0])}"
    if band == len(BANDS_MS):
        return f"over {duration(BANDS_MS[-1])}"
    return f"between {duration(BANDS_MS[band - 1])} and {duration(BANDS_MS[band])}"


def attempt_bar(attempt: Attempt, whole: Timeline) -> Markup:
    """One attempt as a bar on the scale of the whole story."""
    parts = [_segment(segment, attempt, whole) for segment in attempt.segments]
    words = ", ".join(
        f"{_PHASES[each.phase]} {duration(each.to_ms - each.from_ms)}" for each in attempt.segments
    )
    return _BAR.format(words=words, body=Markup("").join(parts))


def _segment(segment: Segment, attempt: Attempt, whole: Timeline) -> Markup:
    span = whole.to_ms - whole.from_ms
    ended = f" end-{attempt.end}" if segment.phase == "run" and attempt.end else ""
    took = duration(segment.to_ms - segment.from_ms)
    return _SEGMENT.format(
        kind=f"seg-{segment.phase}{ended}",
        x=min((segment.from_ms - whole.from_ms) / span * _BAR_W, _BAR_W - 2.0),
        w=max(2.0, (segment.to_ms - segment.from_ms) / span * _BAR_W),
        text=f"{_PHASES[segment.phase]} {took}{' so far' if segment.open else ''}",
    )
