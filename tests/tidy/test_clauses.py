"""Every clause of a SPEC.md is named by a test, and no test names a clause that is not there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.reading import TESTS, contract_folders, files, listed, shown, text, tree

# The contract that a clause's letter stands for.
LETTERS = {
    "memory": "M",
    "streams": "S",
    "bullmq": "B",
    "omniq": "O",
    "inbox": "I",
    "plane": "P",
}
CLAUSE_LINE = re.compile(r"^- \*\*([A-Z]+-\d+)\*\* \S")
LOOKS_LIKE_A_CLAUSE = re.compile(r"^\s*[-*]\s*\**[A-Z]{1,2}-\d+")


def specs() -> list[Path]:
    return [folder / "SPEC.md" for folder in contract_folders() if (folder / "SPEC.md").exists()]


def clauses_of(spec: Path) -> list[str]:
    matches = (CLAUSE_LINE.match(line) for line in text(spec).splitlines())
    return [match[1] for match in matches if match]


def named_in(path: Path) -> Iterator[tuple[str, int]]:
    """The clauses that the `clause` marks of one file name, with their lines."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and _is_clause_mark(node.func):
            for argument in node.args:
                for constant in ast.walk(argument):
                    if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                        yield constant.value, constant.lineno


def _is_clause_mark(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr == "clause"
    return isinstance(function, ast.Name) and function.id == "clause"


def named_by_tests() -> dict[str, str]:
    """Each named clause, with one place that names it."""
    return {
        clause: shown(path, line)
        for path in files(TESTS, "*.py")
        for clause, line in named_in(path)
    }


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
