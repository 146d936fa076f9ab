"""Lua scripts say what they take and give, and their file names count their keys."""

import ast
import re
from pathlib import Path

import pytest

from tests.tidy.clauses import clauses_of, specs
from tests.tidy.lua_headers import problems
from tests.tidy.reading import PACKAGE, files, listed, shown, text, tree

LUA = files(PACKAGE, "*.lua")
CALL = re.compile(r"\bredis\.p?call\(")
CLAUSE = re.compile(r"\b[A-Z]{1,2}-\d+\b")


@pytest.mark.parametrize("path", LUA, ids=shown)
def test_a_lua_script_has_a_header_that_its_code_keeps(path: Path) -> None:
    found = problems(path)
    assert not found, listed([f"{shown(path)}: {problem}" for problem in found])


@pytest.mark.parametrize("path", LUA, ids=shown)
def test_the_clauses_that_a_lua_script_serves_exist(path: Path) -> None:
    known = {clause for spec in specs() for clause in clauses_of(spec)}
    unknown = sorted(set(CLAUSE.findall(text(path))) - known)
    assert not unknown, f"{shown(path)}: in no SPEC.md: {', '.join(unknown)}"


def test_no_lua_is_hidden_in_a_python_string() -> None:
    """`redis.call` belongs into a .lua file, where its header and keys are checked."""
    found = [
        shown(path, node.lineno)
        for path in files(PACKAGE, "*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and CALL.search(str(node.value))
    ]
    assert not found, listed(found)


def test_every_call_of_a_script_declares_the_key_that_guards_it_on_a_cluster() -> None:
    """`Redis.run` does it; who builds a call for a pipeline asks `declared_keys`."""
    client = PACKAGE / "store"
    found = [
        shown(path)
        for path in files(PACKAGE, "*.py")
        if not path.is_relative_to(client)
        and re.search(r'"EVAL(SHA)?"', text(path))
        and "declared_keys(" not in text(path)
    ]
    assert not found, listed(found)
