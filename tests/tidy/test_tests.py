"""The tests themselves: named as claims, found by pytest, waiting for events and not for time."""

import ast
import re
from pathlib import Path

from tests.tidy.reading import TESTS, claims_in, files, listed, shown, text, tree

WORDS_MIN = 4
SLEEPS = {("time", "sleep"), ("asyncio", "sleep"), ("anyio", "sleep")}


def test_every_test_is_named_as_a_claim() -> None:
    problems = [
        f"{shown(path, function.lineno)}: say what is true, in {WORDS_MIN} words or more"
        for path in files(TESTS, "*.py")
        for function in claims_in(path)
        if len(claim(function.name)) < WORDS_MIN
    ]
    assert not problems, listed(problems)


def claim(name: str) -> list[str]:
    return [word for word in name.split("_")[1:] if word]


def test_no_two_tests_of_a_file_share_a_name() -> None:
    """The second would silently replace the first."""
    problems = []
    for path in files(TESTS, "test_*.py"):
        for scope in ast.walk(tree(path)):
            if isinstance(scope, ast.Module | ast.ClassDef):
                names = [
                    node.name
                    for node in scope.body
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    and node.name.startswith("test")
                ]
                problems += [
                    f"{shown(path)}: {name}" for name in set(names) if names.count(name) > 1
                ]
    assert not problems, listed(problems)


def test_every_file_with_tests_is_one_that_pytest_collects() -> None:
    problems = [
        shown(path)
        for path in files(TESTS, "*.py")
        if not path.name.startswith("test_") and has_tests_of_its_own(path)
    ]
    assert not problems, listed(problems)


def has_tests_of_its_own(path: Path) -> bool:
    """A conformance suite is a library of tests, imported where they run; a lone file is not."""
    if not any(node.name.startswith("test_") and asserts(node) for node in claims_in(path)):
        return False
    imports = re.compile(rf"^\s*(from|import)\s.*\b{path.stem}\b", re.MULTILINE)
    return not any(imports.search(text(other)) for other in files(TESTS, "*.py") if other != path)


def asserts(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(function))


def test_no_test_sleeps_in_the_hope_that_something_happened() -> None:
    """A constant pause needs a comment on its line that says why no event can be waited for."""
    problems = [
        f"{shown(path, call.lineno)}: wait for the event, or say on this line why not"
        for path in files(TESTS, "*.py")
        for call in constant_sleeps(path)
        if "#" not in text(path).splitlines()[call.lineno - 1]
    ]
    assert not problems, listed(problems)


def constant_sleeps(path: Path) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr) in SLEEPS
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, int | float)
        and node.args[0].value > 0
    ]
