"""The page: plain HTML with its style inside, which needs no network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tenure.pipeline.report import charts
from tenure.pipeline.report.figures import Figures
from tenure.pipeline.tables.metrics import HOUR_MS

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
    """The whole document."""
    parts = [
        _tiles(figures),
        _section("Throughput, jobs an hour", _throughput(figures)),
        _section("Latency: how long jobs took from submit to end", _latency(figures, "total")),
        _section("Latency: how long they waited for a worker", _latency(figures, "wait")),
        _section("Failures by cause", _causes(figures)),
        _section("Slowest tasks, by the 95th percentile of a run", _tasks(figures)),
        _section("Workers: slots busy on average", _workers(figures)),
        _section("Within the target", _slo(figures)),
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


def _tiles(figures: Figures) -> str:
    audit = figures.audit
    verdict = "not run" if audit is None else f"{audit.violations} violations"
    tiles = [
        (f"{figures.events:,}", "events"),
        (f"{figures.jobs:,}", "jobs"),
        (f"{figures.dead:,}", "dead letters"),
        (f"{len(figures.gaps)}", "gaps"),
        (verdict, "audit"),
    ]
    inside = "".join(f'<div class="tile"><b>{v}</b><span>{n}</span></div>' for v, n in tiles)
    return f'<div class="tiles">{inside}</div>'


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


def _throughput(figures: Figures) -> str:
    series: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for row in figures.by_hour:
        for name in ("submitted", "completed", "failed"):
            series[name][row["hour_ms"]] += row[name]
    return charts.lines({name: sorted(points.items()) for name, points in series.items()}, unit="")


def _latency(figures: Figures, kind: str) -> str:
    cells = {
        (row["hour_ms"], row["bucket"]): row["count"]
        for row in figures.latency
        if row["kind"] == kind
    }
    return charts.heat_map(cells, hour_ms=HOUR_MS)


def _causes(figures: Figures) -> str:
    rows = [
        (f"{row['queue']}: {row['error_code'] or 'no code'}", row["count"], f"{row['count']:,}")
        for row in figures.causes
    ]
    return charts.bars(rows, colour="#dc2626")


def _tasks(figures: Figures) -> str:
    rows = [
        (
            f"{row['queue']}: {row['task']}",
            row["p95"],
            f"{charts.duration(row['p95'])} ({row['attempts']:,} runs)",
        )
        for row in figures.tasks
    ]
    return charts.bars(rows, colour="#d97706")


def _workers(figures: Figures) -> str:
    rows = [
        (row["worker_id"] or "unnamed", row["slots"], f"{row['slots']:.2f} ({row['lost']} lost)")
        for row in figures.workers
    ]
    return charts.bars(rows, colour="#16a34a")


def _slo(figures: Figures) -> str:
    head = ("day", "queue", "target", "finished", "within")
    rows = [
        (
            row["day"],
            f"{row['contract']} {row['queue']}",
            charts.duration(row["target_ms"]),
            f"{row['finished']:,}",
            f"{100 * (row['share'] or 0):.2f} %",
        )
        for row in figures.slo
    ]
    return _table(head, rows) if rows else charts.empty()


def _audit(figures: Figures) -> str:
    if figures.audit is None:
        return '<p class="none">not run: <code>tenure pipeline audit</code></p>'
    marks = {
        "BROKEN": '<span class="bad">broken</span>',
        "sound": '<span class="good">sound</span>',
    }
    rows = [
        (
            escape(each.invariant),
            escape(each.text),
            marks.get(each.mark, "not seen"),
            f"{each.jobs:,}",
            f"{each.violations:,}",
            f"{each.unobserved:,}",
        )
        for each in figures.audit.verdicts
    ]
    head = ("", "promise", "verdict", "jobs", "violations", "not observable")
    shown = _table(head, rows, raw=True)
    if figures.violations:
        found = [(v["invariant"], v["job_id"], v["text"]) for v in figures.violations]
        shown += "<h2>Violations</h2>" + _table(("", "job", "what was seen"), found)
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
