"""The check of Lua headers finds each part that is missing."""

from pathlib import Path

import pytest

from tests.tidy.lua_headers import problems

HEADER = """\
-- Adds one.
-- KEYS[1] the counter
-- ARGV[1] by how much
-- Returns: the new value
-- Clauses: S-1
"""


@pytest.fixture
def lua(tmp_path: Path) -> Path:
    (tmp_path / "include").mkdir()
    return tmp_path


def test_a_complete_header_has_no_problems(lua: Path) -> None:
    path = lua / "add-1.lua"
    path.write_text(HEADER + "return redis.call('INCRBY', KEYS[1], ARGV[1])\n")
    assert problems(path) == []


def test_a_header_in_a_block_comment_has_no_problems(lua: Path) -> None:
    path = lua / "add-1.lua"
    block = HEADER.replace("-- ", "  ")
    path.write_text(f"--[[\n{block}]]\nreturn redis.call('INCRBY', KEYS[1], ARGV[1])\n")
    assert problems(path) == []


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("-- Adds one.\n", "purpose"),
        ("-- KEYS[1] the counter\n", "KEYS[1]"),
        ("-- ARGV[1] by how much\n", "ARGV"),
        ("-- Returns: the new value\n", "Returns"),
        ("-- Clauses: S-1\n", "Clauses"),
    ],
)
def test_each_part_that_a_header_lacks_is_a_problem(lua: Path, without: str, says: str) -> None:
    path = lua / "add-1.lua"
    body = "return redis.call('INCRBY', KEYS[1], ARGV[1])\n"
    path.write_text(HEADER.replace(without, "") + body)
    (problem,) = problems(path)
    assert says in problem


def test_a_part_that_says_nothing_is_a_problem(lua: Path) -> None:
    path = lua / "go-0.lua"
    path.write_text("-- Goes.\n-- Returns:\n\nreturn 1\n")
    assert [p.rpartition(" ")[2] for p in problems(path)] == ["Returns", "Clauses"]


def test_a_script_without_a_header_and_with_wrong_keys_has_both_problems(lua: Path) -> None:
    path = lua / "go-2.lua"
    path.write_text("return KEYS[1]\n")
    purpose, keys = problems(path)
    assert "purpose" in purpose
    assert "2 keys" in keys


def test_an_include_needs_only_its_purpose(lua: Path) -> None:
    path = lua / "include" / "now.lua"
    path.write_text("-- The server's clock in milliseconds.\nlocal now = 1\n")
    assert problems(path) == []
    path.write_text("local now = 1\n")
    assert problems(path) != []
