"""Which clauses there are, and which tests name them. Reads files, imports none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.tidy.reading import TESTS, claims_in, contract_folders, files, shown, text, tree

CLAUSE_LINE = re.compile(r"^- \*\*([A-Z]+-\d+)\*\* \S")


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


@cache
def named_by_tests() -> dict[str, str]:
    """Each named clause, with one place that names it."""
    return {
        clause: shown(path, line)
        for path in files(TESTS, "*.py")
        for clause, line in named_in(path)
    }


def proofs() -> dict[str, list[tuple[Path, str]]]:
    """The tests of each clause: their file, and their name ("" where a whole file is marked)."""
    found: dict[str, list[tuple[Path, str]]] = {}
    for path in files(TESTS, "*.py"):
        if "clause(" not in text(path):
            continue
        spans = [
            (min([node.lineno, *(each.lineno for each in node.decorator_list)]), node)
            for node in claims_in(path)
        ]
        for clause, line in named_in(path):
            inside = (n.name for first, n in spans if first <= line <= (n.end_lineno or line))
            proof = (path, next(inside, ""))
            known = found.setdefault(clause, [])
            if proof not in known:
                known.append(proof)
    return found
