"""The report as plain HTML with its style and its charts (SVG) inside: no script, no network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from tenure.core.encoding import TIME_MS_MAX
from tenure.pipeline.report.figures import Figures

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
WEEK_MS = 7 * DAY_MS
_POINTS = 24 * 14
_DAYS_SHOWN = 31
_STYLE = """
:root{color-scheme:light dark;--ink:#111827;--soft:#6b7280;--line:#e5e7eb;--card:#fff;
--page:#f9fafb}@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--soft:#9ca3af;
--line:#374151;--card:#1f2937;--page:#111827}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}main{max-width:940px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:24px;margin:0}h2{font-size:17px;margin:0 0 8px}section{background:var(--card);
border:1px solid var(--line);border-radius:8px;padding:16px;margin:16px 0;overflow-x:auto}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:16px 0}.tile{flex:1 1 130px;
background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:22px}
.tile span,.none,.legend,small{color:var(--soft)}svg{width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg .r{text-anchor:end}
.grid{stroke:var(--line)}table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:4px 10px 4px 0;border-top:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500;border:0}td.n,th.n{text-align:right}
.legend span{margin-right:14px}.legend i{display:inline-block;width:10px;height:10px;
border-radius:2px;margin-right:5px}.good{color:#16a34a}.bad{color:#dc2626;font-weight:600}code{font-size:13px}
"""


def page(figures: Figures) -> str:
    """The whole document: the verdict first, then charts with a line of words under each."""
    step_ms = _step_ms(figures)
    each = {HOUR_MS: "hour", DAY_MS: "day", WEEK_MS: "week"}[step_ms]
    parts = [
        _section("Verdict", _verdict(figures)),
        _tiles(figures),
        _section(f"Throughput: jobs per {each}", _throughput(figures, step_ms)),
        _section("How long jobs took from submit to end", _latency(figures, "total", step_ms)),
        _section("How long jobs waited for a worker", _latency(figures, "wait", step_ms)),
        _section("Failures by cause", _causes(figures)),
        _section("Slowest tasks", _tasks(figures)),
        _section("Workers", _workers(figures)),
        _section("Service levels", _slo(figures)),
        _section("Audit", _audit(figures)),
        _section("Gaps", _gaps(figures)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Tenure report</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>Tenure report</h1><small>{escape(figures.lake)}</small>{''.join(parts)}"
        "</main></body></html>\n"
    )


def _step_ms(figures: Figures) -> int:
    """How much time a point of a chart stands for: so that no chart has too many."""
    hours = [row["hour_ms"] for row in figures.by_hour] or [0]
    span_ms = max(hours) - min(hours)
    return next((step for step in (HOUR_MS, DAY_MS) if span_ms <= _POINTS * step), WEEK_MS)


def _verdict(figures: Figures) -> str:
    """In sentences what a reader has to know if they read no further."""
    audit = figures.audit
    if audit is None:
        said = [("none", "No audit was run: tenure pipeline audit")]
    elif audit.violations:
        broken = ", ".join(audit.broken)
        said = [("bad", f"Broken: {broken}, {audit.violations:,} times in {audit.jobs:,} jobs.")]
    else:
        said = [("good", f"No promise was broken in {audit.jobs:,} jobs that were judged.")]
    said.append(
        ("bad", f"{len(figures.gaps):,} gaps: events were lost before they could be read.")
        if figures.gaps
        else ("good", "No gaps: every event of the journals is here.")
    )
    if figures.slo:
        day = max(row["day"] for row in figures.slo)
        worst = min((row for row in figures.slo if row["day"] == day), key=lambda r: r["share"])
        within = f"ended well within {duration(worst['target_ms'])}; no queue did worse."
        said.append(
            ("none", f"On {day}, {worst['share']:.1%} of the jobs of {worst['queue']} {within}")
        )
    return "".join(f'<p class="{kind}">{escape(text)}</p>' for kind, text in said)


def _tiles(figures: Figures) -> str:
    tiles = [
        (f"{figures.events:,}", "events"),
        (f"{figures.jobs:,}", "jobs"),
        (f"{figures.dead:,}", "dead letters"),
        (f"{figures.journals:,}", "journals"),
    ]
    inside = "".join(f'<div class="tile"><b>{v}</b><span>{n}</span></div>' for v, n in tiles)
    return f'<div class="tiles">{inside}</div>'


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


def _said(text: str) -> str:
    return f'<p class="none">{escape(text)}</p>'


def _throughput(figures: Figures, step_ms: int) -> str:
    series: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for row in figures.by_hour:
        for name in ("submitted", "completed", "failed"):
            series[name][row["hour_ms"] // step_ms * step_ms] += row[name]
    drawn = lines({name: sorted(points.items()) for name, points in series.items()}, unit="")
    submitted, completed, failed = (
        sum(series[name].values()) for name in ("submitted", "completed", "failed")
    )
    return drawn + _said(
        f"{submitted:,.0f} jobs were submitted, {completed:,.0f} succeeded, {failed:,.0f} failed "
        "for good. Where submitted runs above the others, work piles up."
    )


def _latency(figures: Figures, kind: str, step_ms: int) -> str:
    cells: dict[tuple[int, int], int] = defaultdict(int)
    for row in figures.latency:
        if row["kind"] == kind:
            cells[row["hour_ms"] // step_ms * step_ms, row["bucket"]] += row["count"]
    return heat_map(cells, step_ms=step_ms) + _said(
        "Each column is a time, each row a duration; the darker, the more jobs. "
        f"{_most(cells)}A band that climbs means that jobs become slower."
    )


def _most(cells: Mapping[tuple[int, int], int]) -> str:
    """Where half and nearly all of the jobs lie, in words."""
    total, passed = sum(cells.values()), 0
    edges: dict[float, str] = {}
    for bucket in sorted({bucket for _, bucket in cells}):
        passed += sum(n for (_, each), n in cells.items() if each == bucket)
        for share in (0.5, 0.99):
            if passed >= share * total:
                edges.setdefault(share, duration(2 ** (bucket + 1)))
    return f"Half took less than {edges[0.5]}, 99% less than {edges[0.99]}. " if edges else ""


def _causes(figures: Figures) -> str:
    rows = [
        (f"{row['queue']}: {row['error_code'] or 'no code'}", row["count"], f"{row['count']:,}")
        for row in figures.causes
    ]
    return bars(rows, colour="#dc2626") + _said(
        "Jobs that failed for good, by the code of their last error."
    )


def _tasks(figures: Figures) -> str:
    rows = [
        (
            f"{row['queue']}: {row['task']}",
            row["p95"],
            f"{duration(row['p95'])} ({row['attempts']:,} runs)",
        )
        for row in figures.tasks
    ]
    return bars(rows, colour="#d97706") + _said("19 of 20 runs of the task took less than this.")


def _workers(figures: Figures) -> str:
    rows = [
        (row["worker_id"] or "unnamed", row["slots"], f"{row['slots']:.2f} ({row['lost']} lost)")
        for row in figures.workers
    ]
    return bars(rows, colour="#16a34a") + _said(
        "How many jobs each ran at a time, on average; lost are leases that ran out."
    )


def _slo(figures: Figures) -> str:
    head = ("day", "queue", "target", "finished", "within")
    days = sorted({row["day"] for row in figures.slo})[-_DAYS_SHOWN:]
    rows = [
        (
            row["day"],
            f"{row['contract']} {row['queue']}",
            duration(row["target_ms"]),
            f"{row['finished']:,}",
            f"{100 * (row['share'] or 0):.2f} %",
        )
        for row in figures.slo
        if row["day"] in days
    ]
    if not rows:
        return empty()
    return _table(head, rows) + _said(
        "How many of the jobs that ended on a day succeeded within the target, from submit to end."
        f" The last {len(days)} days with jobs; the table slo has all."
    )


def _audit(figures: Figures) -> str:
    if figures.audit is None:
        return '<p class="none">not run: <code>tenure pipeline audit</code></p>'
    judged = [each for each in figures.audit.verdicts if each.mark != "not seen"]
    rows = [
        (
            escape(each.invariant),
            escape(each.text),
            f'<span class="{"bad" if each.violations else "good"}">{each.mark.lower()}</span>',
            f"{each.jobs - each.unobserved:,}",
            f"{each.violations:,}",
            f"{each.unobserved:,}",
        )
        for each in judged
    ]
    shown = _table(
        ("", "promise", "verdict", "jobs judged", "broken", "not judged"), rows, raw=True
    )
    if figures.violations:
        found = [(v["invariant"], v["job_id"], v["text"]) for v in figures.violations]
        shown += "<h2>Violations</h2>" + _table(("", "job", "what was seen"), found)
    apart = [
        (each.invariant, each.text, each.reason or "no job of these queues shows it")
        for each in figures.audit.verdicts
        if each not in judged
    ]
    if apart:
        shown += "<h2>Not judged here</h2>" + _table(("", "promise", "why"), apart)
    return shown


def _gaps(figures: Figures) -> str:
    if not figures.gaps:
        return '<p class="good">none: every event of the journals is here</p>'
    return _table(("gap",), [(str(gap),) for gap in figures.gaps])


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, raw: bool = False) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{cell if raw else escape(str(cell))}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><tr>{titles}</tr>{''.join(lines)}</table>"


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


def heat_map(cells: Mapping[tuple[int, int], int], *, step_ms: int) -> str:
    """Counts by time and power of two milliseconds: dark is much."""
    if not cells:
        return empty()
    hours = sorted({hour for hour, _ in cells})
    begin, count = hours[0], (hours[-1] - hours[0]) // step_ms + 1
    low, high = min(b for _, b in cells), max(b for _, b in cells)
    width = (WIDTH - _LEFT - _RIGHT) / count
    height = (HEIGHT - _TOP - _BOTTOM) / (high - low + 1)
    most = max(cells.values())
    drawn = [_times(hours[0], hours[-1])]
    for (hour, bucket), n in sorted(cells.items()):
        x = _LEFT + (hour - begin) // step_ms * width
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
