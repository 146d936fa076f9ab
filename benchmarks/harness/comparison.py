"""The figures of docs/concepts/comparison.md, taken from the tables in results/ and nowhere else.

`run.py` brings the page up to date whenever it writes into results/; a test holds the two together.
By hand: `python benchmarks/run.py --page`.
"""

from __future__ import annotations

import re
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "results"
PAGE = BENCHMARKS.parent / "docs" / "concepts" / "comparison.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
# What people ask first comes first; a scenario that is not here follows by its name.
ORDER = ("noop", "latency", "enqueue", "kill", "bullmq", "depth", "omniq", "inbox", "sse", "rss")


def refreshed(page: str, folder: Path = RESULTS) -> str:
    """The page with the figures that `folder` holds now."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}")
    parts = [_section(path) for path in _ranked(folder)]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def write_page(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Bring the page up to date."""
    page.write_text(refreshed(page.read_text(), folder))


def _ranked(folder: Path) -> list[Path]:
    known = {name: at for at, name in enumerate(ORDER)}
    return sorted(folder.glob("*.md"), key=lambda path: (known.get(path.stem, 99), path.stem))


def _section(path: Path) -> str:
    lines = path.read_text().splitlines()
    title = lines[0].removeprefix("# ")
    run = _run_of(lines)
    source = f"../../benchmarks/results/{path.name}"
    table = [_medians(line) for line in lines if line.startswith("|")]
    notes = [line for line in lines if line.startswith("- ")]
    elsewhere = _elsewhere(path, _facts(run)["redis"])
    head = [f"### {title}", "", f"{_when(run)} [All of it]({source}).", ""]
    return "\n".join([*head, *table, "", *notes, *elsewhere])


def _elsewhere(path: Path, here: str) -> list[str]:
    """What came of the scenario's goals on other servers: each has a folder that bears its name."""
    told = []
    for other in sorted(path.parent.glob(f"*/{path.name}")):
        lines = other.read_text().splitlines()
        run = _run_of(lines)
        goals = [
            line.removeprefix("- ")
            for line in lines
            if re.search(r"\((met|\*\*missed\*\*)\)$", line)
        ]
        source = f"../../benchmarks/results/{other.parent.name}/{other.name}"
        told.append(f"- [{_facts(run)['redis']}]({source}), {_size(run)}: {'; '.join(goals)}")
    return ["", f"That was on {here}. The same on other servers:", "", *told] if told else []


def _run_of(lines: list[str]) -> str:
    return next(line for line in lines if line.startswith("Median (lowest to highest)"))


def _facts(run: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+): ([^,]+)", run))


def _size(run: str) -> str:
    return run.split("; ", 1)[1].split(". ", 1)[0]


def _when(run: str) -> str:
    """Date, size and machine of a run, without what only its own page needs.

    >>> _when("Median (lowest to highest) of the rounds; size 9, rounds 3. date: 2026-01-02 03:04 "
    ...       "UTC, cores: 2, cpu: AMD EPYC, memory: 24.7 GB, python: 3.11.7, aof: off, load x.")
    'Measured 2026-01-02, size 9, rounds 3, on 2 cores of AMD EPYC with Python 3.11.7.'
    """
    facts = _facts(run)
    machine = f"on {facts['cores']} cores of {facts['cpu']} with Python {facts['python']}"
    return f"Measured {facts['date'].split()[0]}, {_size(run)}, {machine}."


def _medians(row: str) -> str:
    """A row of a table without the lowest and the highest.

    >>> _medians("| rq | 139 (112 to 180) | 0.06 |")
    '| rq | 139 | 0.06 |'
    """
    return re.sub(r" \([\d.,]+ to [\d.,]+\)", "", row)
