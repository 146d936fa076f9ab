"""Every clause of a SPEC.md is named by a test, and no test names a clause that is not there."""

import re
from pathlib import Path

import pytest

from tests.tidy.clauses import CLAUSE_LINE, clauses_of, named_by_tests, specs
from tests.tidy.reading import listed, shown, text

# The contract that a clause's letter stands for.
LETTERS = {
    "memory": "M",
    "streams": "S",
    "bullmq": "B",
    "omniq": "O",
    "inbox": "I",
    "plane": "P",
}
LOOKS_LIKE_A_CLAUSE = re.compile(r"^\s*[-*]\s*\**[A-Z]{1,2}-\d+")


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.parent.name)
def test_every_clause_of_a_spec_is_named_by_a_test(spec: Path) -> None:
    clauses = clauses_of(spec)
    named = named_by_tests()
    assert clauses, f"{shown(spec)} has no line of the form `- **S-1** text`"
    unproven = [clause for clause in clauses if clause not in named]
    assert not unproven, f"{shown(spec)}: no test carries @pytest.mark.clause for {unproven}"


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.parent.name)
def test_the_clauses_of_a_spec_are_well_formed_and_stand_once(spec: Path) -> None:
    letter = LETTERS.get(spec.parent.name)
    assert letter, f"give contract {spec.parent.name!r} a letter in LETTERS"
    problems = []
    seen: set[str] = set()
    for number, line in enumerate(text(spec).splitlines(), 1):
        match = CLAUSE_LINE.match(line)
        if not match:
            if LOOKS_LIKE_A_CLAUSE.match(line):
                problems.append(
                    f"{shown(spec, number)}: write `- **{letter}-1** text`, not {line!r}"
                )
            continue
        if match[1] in seen:
            problems.append(f"{shown(spec, number)}: {match[1]} stands twice")
        if match[1].split("-")[0] != letter:
            problems.append(f"{shown(spec, number)}: clauses of this contract begin with {letter}-")
        seen.add(match[1])
    assert not problems, listed(problems)


def test_every_clause_that_a_test_names_exists() -> None:
    known = {clause for spec in specs() for clause in clauses_of(spec)}
    problems = [
        f"{place}: {clause} is in no contracts/*/SPEC.md"
        for clause, place in named_by_tests().items()
        if clause not in known
    ]
    assert not problems, listed(problems)
