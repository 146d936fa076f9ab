"""`tenure check`: does this store keep what its contract promises?"""

from __future__ import annotations

import asyncio
from collections import Counter

import click
import msgspec

from tenure.cli.conformance import Clause, check_reachable, judge, run_suite
from tenure.cli.exits import Exit
from tenure.cli.options import json_option
from tenure.cli.output import emit, emit_text, paint, table
from tenure.core.registry import parse_url

_COLOURS = {"held": "green", "broken": "red", "not asked": "dim"}


@click.command("check", short_help="Run the conformance suite on a live store.")
@click.argument("url", metavar="URL")
@click.option("--only", "words", default="", help="Only tests whose names match, as pytest's -k.")
@json_option
def command(url: str, words: str, as_json: bool) -> int:
    """Run the conformance suite on a store that runs, and say which clauses hold.

    The clauses are what every contract means by submit, claim, extend and settle.

    It works under names of its own, which it removes at the end, but it works hard: choose a store
    for tests. The suite comes with the source, so this runs in a checkout. Exit code 8 when a
    clause is broken.

    \b
    tenure check streams+redis://127.0.0.1:6379/15
    """
    parsed = parse_url(url)
    asyncio.run(check_reachable(parsed))
    ran = run_suite(parsed, words=words)
    clauses = judge(ran)
    if as_json:
        for clause in clauses:
            emit(msgspec.to_builtins(clause))
    else:
        emit_text(table(["CLAUSE", "", "TESTS", "SAYS"], map(_row, clauses)))
        tally = Counter(clause.verdict for clause in clauses)
        failed = sum(not test.passed for test in ran)
        said = ", ".join(f"{count} {verdict}" for verdict, count in tally.items())
        emit_text(f"{len(ran)} tests, {failed} failed; clauses: {said}")
    return Exit.PROBLEMS if any(not test.passed for test in ran) else Exit.OK


def _row(clause: Clause) -> list[str]:
    verdict = paint(clause.verdict, _COLOURS[clause.verdict])
    return [clause.clause, verdict, str(clause.tests or "-"), clause.text[:90]]
