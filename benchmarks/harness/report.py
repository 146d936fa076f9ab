"""Results as JSON (everything) and Markdown (the table), each written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.rounds import Contender, Results
from harness.scenario import OURS, Column


def write(
    results: Results, folder: Path, facts: Mapping[str, str], settings: Mapping[str, Any]
) -> Path:
    """`<scenario>.json` and `<scenario>.md` in `folder`; answers the path of the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    name = results.scenario.name
    document = json.dumps(as_document(results, facts, settings), indent=1) + "\n"
    _replace(folder / f"{name}.json", document)
    _replace(folder / f"{name}.md", as_markdown(results, facts, settings))
    return folder / f"{name}.md"


def as_document(
    results: Results, facts: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "scenario": results.scenario.name,
        "title": results.scenario.title,
        "machine": dict(facts),
        "settings": dict(settings),
        "contenders": {
            name: {
                **contender.prepared,
                "is_peer": name not in OURS,
                "summary": {
                    column.key: _spread(contender, column) for column in results.scenario.columns
                },
                "ratio_to_best_peer": results.ratio(name),
                "runs": [dict(run) for run in contender.runs],
                "errors": contender.errors,
            }
            for name, contender in results.contenders.items()
        },
        "goals": goals(results),
    }


def goals(results: Results) -> list[dict[str, Any]]:
    """Every goal with what was measured; `met` is None when this run cannot tell."""
    told = []
    for goal in results.scenario.goals:
        value = goal.value(_reader(results))
        told.append(
            {
                "claim": goal.claim,
                "measured": value,
                "met": None if value is None else goal.met(value),
            }
        )
    return told


def _reader(results: Results) -> Any:
    def median(name: str, key: str) -> float | None:
        return results.best_peer(key) if name == "best peer" else results.median(name, key)

    return median


def as_markdown(results: Results, facts: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    scenario = results.scenario
    machine = ", ".join(f"{key}: {value}" for key, value in facts.items())
    chosen = ", ".join(f"{key} {value}" for key, value in settings.items())
    parts = [
        f"# {scenario.title}",
        scenario.about,
        f"Median (lowest to highest) of the rounds; {chosen}. {machine}.",
        _table(results),
        _goal_lines(results),
        _contender_lines(results),
        _error_lines(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(results: Results) -> str:
    columns = results.scenario.columns
    headline = results.scenario.column(results.scenario.headline)
    heads = ["", *(column.heading for column in columns), f"{headline.heading} / best peer"]
    rows = [heads, ["---"] * len(heads)]
    for name in _ranked(results):
        contender, ratio = results.contenders[name], results.ratio(name)
        cells = [_cell(contender, column) for column in columns]
        rows.append([name, *cells, "-" if ratio is None else f"{ratio:.2f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _ranked(results: Results) -> list[str]:
    """Best headline figure first; those without one last."""
    headline = results.scenario.column(results.scenario.headline)
    sign = 1 if headline.better == "low" else -1

    def rank(name: str) -> tuple[bool, float]:
        median = results.median(name, headline.key)
        return (median is None, 0.0 if median is None else sign * median)

    return sorted(results.contenders, key=rank)


def _cell(contender: Contender, column: Column) -> str:
    if not contender.runs:
        return "failed" if contender.errors else "not run"
    values = contender.values(column.key)
    if not values:
        return column.absent
    low, middle, high = (
        f"{value:,.{column.digits}f}"
        for value in (min(values), contender.median(column.key) or 0, max(values))
    )
    return middle if low == high else f"{middle} ({low} to {high})"


def _spread(contender: Contender, column: Column) -> dict[str, float] | None:
    values = contender.values(column.key)
    median = contender.median(column.key)
    if median is None:
        return None
    return {"median": median, "min": min(values), "max": max(values)}


def _goal_lines(results: Results) -> str:
    words = {True: "met", False: "**missed**", None: "not measured in this run"}
    lines = []
    for goal in goals(results):
        figure = "" if goal["measured"] is None else f": {goal['measured']:,.2f}"
        lines.append(f"- {goal['claim']}{figure} ({words[goal['met']]})")
    return "\n".join(lines)


def _contender_lines(results: Results) -> str:
    lines = []
    for name, contender in results.contenders.items():
        told = contender.prepared
        if told:
            versions = ", ".join(f"{key} {value}" for key, value in told["versions"].items())
            lines.append(f"- {name}: {versions}; {told['notes']}; `{told['worker']}`")
    return "\n".join(lines)


def _error_lines(results: Results) -> str:
    return "\n".join(
        f"- {name} failed: {error.splitlines()[0]}"
        for name, contender in results.contenders.items()
        for error in contender.errors
    )


def _replace(path: Path, text: str) -> None:
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(draft).chmod(0o644)
    Path(draft).replace(path)
