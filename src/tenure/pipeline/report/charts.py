"""Charts as SVG: lines over time, a heat map, bars. No script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from tenure.core.encoding import TIME_MS_MAX

WIDTH, HEIGHT = 860, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 26
COLOURS = ("#2563eb", "#16a34a", "#dc2626", "#d97706", "#7c3aed", "#0891b2")


def lines(points: Mapping[str, Sequence[tuple[int, float]]], *, unit: str) -> str:
    """One line for each name, over milliseconds since 1970."""
    every = [point for series in points.values() for point in series]
    if not every:
        return empty()
    begin, end = min(ms for ms, _ in every), max(ms for ms, _ in every)
    top = max((value for _, value in every), default=0.0) or 1.0

    def at(ms: int, value: float) -> str:
        x = _LEFT + (ms - begin) / max(1, end - begin) * (WIDTH - _LEFT - _RIGHT)
        y = HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    drawn = [_grid(top, unit), _times(begin, end)]
    for colour, (name, series) in zip(_colours(), points.items(), strict=False):
        if len(series) == 1:
            x, y = at(*series[0]).split(",")
            drawn.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        path = " ".join(at(ms, value) for ms, value in series)
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2">'
            f"<title>{escape(name)}</title></polyline>"
        )
    return _svg("".join(drawn)) + legend(list(points))


def heat_map(cells: Mapping[tuple[int, int], int], *, hour_ms: int) -> str:
    """Counts by hour and power of two milliseconds: dark is much."""
    if not cells:
        return empty()
    hours = sorted({hour for hour, _ in cells})
    begin, count = hours[0], (hours[-1] - hours[0]) // hour_ms + 1
    low, high = min(b for _, b in cells), max(b for _, b in cells)
    width = (WIDTH - _LEFT - _RIGHT) / count
    height = (HEIGHT - _TOP - _BOTTOM) / (high - low + 1)
    most = max(cells.values())
    drawn = [_times(hours[0], hours[-1])]
    for (hour, bucket), n in sorted(cells.items()):
        x = _LEFT + (hour - begin) // hour_ms * width
        y = HEIGHT - _BOTTOM - (bucket - low + 1) * height
        shade = 0.12 + 0.88 * (n / most) ** 0.4
        drawn.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(1, width - 0.5):.1f}" '
            f'height="{max(1, height - 0.5):.1f}" fill="#1d4ed8" fill-opacity="{shade:.2f}">'
            f"<title>{n} around {duration(2**bucket)}</title></rect>"
        )
    for bucket in range(low, high + 1, max(1, (high - low) // 6)):
        y = HEIGHT - _BOTTOM - (bucket - low + 0.3) * height
        drawn.append(f'<text x="{_LEFT - 6}" y="{y:.1f}" class="r">{duration(2**bucket)}</text>')
    return _svg("".join(drawn))


def bars(rows: Sequence[tuple[str, float, str]], *, colour: str = COLOURS[0]) -> str:
    """A bar for each name, with its value in words."""
    if not rows:
        return empty()
    top = max(value for _, value, _ in rows) or 1.0
    drawn = []
    for number, (name, value, words) in enumerate(rows):
        y = 6 + number * 24
        length = value / top * (WIDTH - 430)
        drawn.append(
            f'<text x="290" y="{y + 14}" class="r">{escape(name[:46])}</text>'
            f'<rect x="300" y="{y}" width="{max(1.0, length):.1f}" height="18" rx="2" '
            f'fill="{colour}"/><text x="{306 + length:.1f}" y="{y + 14}">{escape(words)}</text>'
        )
    return _svg("".join(drawn), height=12 + 24 * len(rows))


def legend(names: Sequence[str]) -> str:
    """The colours and their names."""
    marks = (
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for colour, name in zip(_colours(), names, strict=False)
    )
    return f'<p class="legend">{"".join(marks)}</p>'


def empty() -> str:
    """Where there is nothing to draw yet."""
    return '<p class="none">nothing yet</p>'


def duration(ms: float) -> str:
    """Milliseconds in the unit that says enough.

    >>> duration(8), duration(2048), duration(131072), duration(8388608)
    ('8 ms', '2 s', '2 min', '2 h')
    """
    for unit, size in (("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if ms >= size:
            is_round = ms >= 10 * size or ms % size <= size / 10
            return f"{ms / size:.0f} {unit}" if is_round else f"{ms / size:.3g} {unit}"
    return f"{ms:.0f} ms"


def _colours() -> Sequence[str]:
    return COLOURS * 3


def _grid(top: float, unit: str) -> str:
    drawn = []
    for part in (0, 0.5, 1):
        y = HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM)
        drawn.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4}" class="r">{part * top:,.4g}{escape(unit)}</text>'
        )
    return "".join(drawn)


def _times(begin: int, end: int) -> str:
    def words(ms: int) -> str:
        return datetime.fromtimestamp(min(ms, TIME_MS_MAX) / 1000, UTC).strftime("%d %b %H:%M")

    y = HEIGHT - 8
    return (
        f'<text x="{_LEFT}" y="{y}">{words(begin)}</text>'
        f'<text x="{WIDTH - _RIGHT}" y="{y}" class="r">{words(end)} UTC</text>'
    )


def _svg(inside: str, *, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{inside}</svg>'
