"""Small pictures made on the server as SVG: sparklines, the heat map, the bars of a timeline.

Only attributes, no style: the policy of the pages forbids inline styles. Colours come from the
style sheet by class, so that dark mode works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from tenure.dashboard.observing import Second
from tenure.dashboard.timeline import Attempt, Segment, Timeline
from tenure.dashboard.timing import BANDS_MS, band_of
from tenure.dashboard.wording import duration

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
