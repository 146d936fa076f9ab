"""The figures of docs/concepts/comparison.md and of the README, taken from results/ alone.

`run.py` brings both up to date whenever it writes into results/; a test holds them to the results.
By hand: `python benchmarks/run.py --page`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "results"
PAGE = BENCHMARKS.parent / "docs" / "concepts" / "comparison.md"
README = BENCHMARKS.parent / "README.md"
FIGURES = ("<!-- figures: begin -->", "<!-- figures: end -->")
SPEED = ("<!-- speed: begin -->", "<!-- speed: end -->")
HEAD = ("measured", "Tenure", "best other system", "Tenure / other", "raw results")
# No peers: our own contenders, and our scripts without a worker.
_OWN = re.compile(r"tenure|bare_|primaries_")


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the page: which cell of a scenario's table it shows.

    own       our contender
    lower     a lower figure is better
    others    the contenders that are not ours; empty: all but our own
    """

    scenario: str
    question: str
    column: str
    own: str = "tenure"
    lower: bool = False
    others: tuple[str, ...] = ()


FIGURES_SHOWN = (
    Figure("noop", "no-op jobs per second, one worker process", "jobs/s"),
    Figure("latency", "submit to start at 100 jobs/s, p99 in ms", "p99 ms", lower=True),
    Figure("enqueue", "jobs submitted per second, one producer", "best of them/s"),
    Figure("kill", "of 1,000 jobs, not done 60 s after `kill -9`", "not done", lower=True),
    Figure("rss", "memory of a worker after its jobs, MB", "all processes MB", lower=True),
    Figure("bullmq", "jobs per second on a BullMQ queue", "jobs/s at 100", "tenure_bullmq"),
    Figure(
        "depth",
        "Redis CPU per job, 1,000,000 others waiting, us",
        "us/job, 1,000,000 waiting",
        "tenure_bullmq",
        lower=True,
    ),
    Figure("omniq", "jobs per second on an OmniQ queue", "jobs/s", "tenure_omniq"),
    Figure(
        "cluster",
        "Redis CPU per job of a queue over three primaries, us",
        "Redis CPU us/job",
        "primaries_3",
        lower=True,
        others=("-",),
    ),
    Figure("inbox", "jobs per second on PostgreSQL", "jobs/s", "tenure_inbox"),
    Figure("plane", "jobs per second over HTTP", "jobs/s", "tenure_plane"),
    Figure("sse", "live event to 5,000 browsers, p99 in ms", "p99 ms", lower=True),
    Figure("webhooks", "signed webhooks per second", "deliveries/s", "tenure_inbox_events"),
    Figure(
        "claims",
        "p99 of a claim with 1,000,000 scheduled jobs, ms",
        "later, many",
        "tenure_inbox",
        lower=True,
    ),
    Figure("pipeline_capture", "events captured per second", "events/s", others=("plain python",)),
    Figure("pipeline_audit", "events audited per second", "events/s", others=("duckdb", "polars")),
    Figure(
        "pipeline_enqueue", "rows enqueued per second by Spark", "jobs/s", "postgres", others=("-",)
    ),
)


def refreshed(page: str, folder: Path = RESULTS) -> str:
    """The page with the figures that `folder` holds now."""
    lines = [_row(HEAD), _row(["---"] * len(HEAD))]
    lines += [_row(_cells(figure, folder)) for figure in _figures(folder)]
    return between(page, FIGURES, "\n\n" + "\n".join([*lines, "", *_missed(folder)]) + "\n\n")


def speed(readme: str, folder: Path = RESULTS) -> str:
    """The README with the sentence about the headline figure."""
    own, other, ratio = _compared(FIGURES_SHOWN[0], folder)
    everywhere = sorted(
        float(_compared(FIGURES_SHOWN[0], path.parent)[2]) for path in folder.rglob("noop.md")
    )
    return between(
        readme,
        SPEED,
        f"\n  One worker process runs {own} no-op jobs per second, {ratio} times as many as the\n"
        f"  fastest other Python queue that we measured, {other}, and {everywhere[0]} to\n"
        f"  {everywhere[-1]} times on other servers. [Raw results](benchmarks/results/noop.md),\n"
        "  [all comparisons](docs/concepts/comparison.md).\n  ",
    )


def write_page(folder: Path = RESULTS, page: Path = PAGE, readme: Path = README) -> None:
    """Bring the page and the README up to date."""
    page.write_text(refreshed(page.read_text(), folder))
    readme.write_text(speed(readme.read_text(), folder))


def between(text: str, marks: tuple[str, str], new: str) -> str:
    """The text with something new between two marks."""
    before, _, rest = text.partition(marks[0])
    _, found, after = rest.partition(marks[1])
    if not found:
        raise ValueError(f"the page needs the lines {marks[0]} and {marks[1]}")
    return f"{before}{marks[0]}{new}{marks[1]}{after}"


def _figures(folder: Path) -> list[Figure]:
    """Those of the list, then the headline figure of each scenario that it lacks."""
    known = [figure for figure in FIGURES_SHOWN if (folder / f"{figure.scenario}.md").exists()]
    new = sorted({path.stem for path in folder.glob("*.md")} - {each.scenario for each in known})
    return known + [_headline(stem, (folder / f"{stem}.md").read_text()) for stem in new]


def _headline(stem: str, text: str) -> Figure:
    table = _table(text)
    column = list(next(iter(table.values())))[-1].removesuffix(" / best peer")
    own = next((name for name in table if name.startswith("tenure")), next(iter(table)))
    return Figure(stem, text.splitlines()[0].removeprefix("# "), column, own)


def _cells(figure: Figure, folder: Path) -> list[str]:
    own, other, ratio = _compared(figure, folder)
    name = f"{figure.scenario}.md"
    servers = [path.parent.name for path in sorted(folder.glob(f"*/{name}"))]
    links = [
        f"[{figure.scenario}](../../benchmarks/results/{name})",
        *(f"[{each}](../../benchmarks/results/{each}/{name})" for each in servers),
    ]
    return [figure.question, own, other, ratio, ", ".join(links)]


def _compared(figure: Figure, folder: Path) -> tuple[str, str, str]:
    """Our figure, the best other one with its name, and the ratio of the two."""
    table = _table((folder / f"{figure.scenario}.md").read_text())
    own = table[figure.own][figure.column]
    others = {
        name: row[figure.column]
        for name, row in table.items()
        if (name in figure.others if figure.others else not _OWN.match(name))
        and _number(row[figure.column]) is not None
    }
    if not others:
        return own, "not measured", "-"
    best = (min if figure.lower else max)(others, key=lambda name: _number(others[name]) or 0.0)
    mine, peer = _number(own) or 0.0, _number(others[best])
    return own, f"{others[best]} ({best})", f"{mine / peer:.1f}" if mine and peer else "-"


def _table(text: str) -> dict[str, dict[str, str]]:
    """The medians of a result's table, by contender and column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head, map(_median, row), strict=True)) for row in rows}


def _median(cell: str) -> str:
    """A cell without the lowest and the highest.

    >>> _median("139 (112 to 180)")
    '139'
    """
    return re.sub(r" \([\d.,]+ to [\d.,]+\)", "", cell)


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def _missed(folder: Path) -> list[str]:
    """The goals that were missed, on whichever server."""
    missed = []
    for path in sorted(folder.rglob("*.md")):
        source = path.relative_to(folder)
        for line in path.read_text().splitlines():
            if line.endswith("(**missed**)"):
                goal = line.removeprefix("- ").removesuffix(" (**missed**)")
                missed.append(f"- {goal} ([{source}](../../benchmarks/results/{source}))")
    return ["Goals that we missed:", "", *missed] if missed else ["Every goal was met."]


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
