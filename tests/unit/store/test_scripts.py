"""The loader of Lua files: what it puts together, and what it refuses."""

import hashlib
from pathlib import Path

import pytest

from tenure.core.errors import UsageError
from tenure.store.scripts import ScriptFolder, load_script, load_scripts, problems

HEADER = """\
-- Adds one.
-- KEYS[1] the counter
-- ARGV[1] by how much
-- Returns: the new value
-- Clauses: S-1
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lua folder of an importable package."""
    name = f"scripts_of_{tmp_path.name.replace('-', '_')}"
    lua = tmp_path / name / "lua"
    (lua / "include").mkdir(parents=True)
    (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return lua


def loaded(lua: Path) -> dict[str, str]:
    return {name: s.source for name, s in load_scripts(lua.parent.name).items()}


def test_a_script_has_its_name_keys_and_hash_from_its_file(package: Path) -> None:
    source = "return redis.call('INCR', KEYS[1]) + #KEYS[2]"
    (package / "add_one-2.lua").write_text(source)
    script = load_scripts(package.parent.name)["add_one"]
    assert (script.name, script.keys, script.source) == ("add_one", 2, source)
    assert script.sha == hashlib.sha1(source.encode()).hexdigest()
    assert "INCR" not in repr(script)


def test_includes_are_put_in_place_once_however_often_they_are_asked_for(package: Path) -> None:
    (package / "include" / "now.lua").write_text("local now = 1\n")
    (package / "include" / "log.lua").write_text("-- @include now\nlocal log = now\n")
    (package / "go-0.lua").write_text("-- @include log\n-- @include now\nreturn log\n")
    source = loaded(package)["go"]
    assert source.count("local now = 1") == 1
    assert source.index("local now") < source.index("local log") < source.index("return log")


def test_an_include_is_the_packages_own_before_it_is_one_that_contracts_share(
    package: Path,
) -> None:
    (package / "go-0.lua").write_text("-- @include trim\nreturn 1\n")
    assert "function trim_journal" in loaded(package)["go"]
    (package / "include" / "trim.lua").write_text("-- Ours.\n")
    assert loaded(package)["go"] == "-- Ours.\n\nreturn 1\n"


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("go.lua", "return 1", "expected <operation>-<number of keys>.lua"),
        ("go-2.lua", "return KEYS[1]", r"name says 2 keys, its greatest is KEYS\[1\]"),
        ("go-1.lua", "return KEYS[1] .. KEYS[ 2 ]", "go-2.lua"),
        ("go-1.lua", "-- KEYS[1] only in a comment\nreturn 1", r"greatest is KEYS\[0\]"),
        ("go-1.lua", "return 'KEYS[1]'", r"greatest is KEYS\[0\]"),
        ("go-1.lua", "for i = 1, 9 do f(KEYS[i]) end", "KEYS is used without a number"),
        ("go-1.lua", "return #KEYS", "KEYS is used without a number"),
        ("go-0.lua", "-- @include nothing\nreturn 1", "no lua/include/nothing.lua"),
    ],
)
def test_a_script_that_contradicts_itself_is_refused(
    package: Path, name: str, source: str, says: str
) -> None:
    (package / name).write_text(source)
    with pytest.raises(UsageError, match=says):
        loaded(package)


def test_includes_in_a_circle_are_refused_with_the_circle(package: Path) -> None:
    (package / "include" / "a.lua").write_text("-- @include b\n")
    (package / "include" / "b.lua").write_text("-- @include a\n")
    (package / "go-0.lua").write_text("-- @include a\nreturn 1\n")
    with pytest.raises(UsageError, match="a -> b -> a"):
        loaded(package)


def test_two_scripts_of_one_name_are_refused(package: Path) -> None:
    (package / "go-0.lua").write_text("return 1")
    (package / "go-1.lua").write_text("return KEYS[1]")
    with pytest.raises(UsageError, match="two scripts are called go"):
        loaded(package)


def test_a_package_without_scripts_is_refused(package: Path) -> None:
    with pytest.raises(UsageError, match="has no lua/"):
        loaded(package)
    with pytest.raises(UsageError, match="has no folder lua/"):
        load_scripts("tenure.core")


def test_a_comment_inside_a_string_does_not_hide_a_key(package: Path) -> None:
    (package / "go-1.lua").write_text("return '--' .. KEYS[1]")
    assert load_script(package / "go-1.lua", package / "include").keys == 1


def test_a_complete_header_has_no_problems(package: Path) -> None:
    path = package / "add-1.lua"
    path.write_text(HEADER + "return redis.call('INCRBY', KEYS[1], ARGV[1])\n")
    assert problems(path) == []


def test_a_header_in_a_block_comment_has_no_problems(package: Path) -> None:
    path = package / "add-1.lua"
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
def test_each_part_that_a_header_lacks_is_a_problem(package: Path, without: str, says: str) -> None:
    path = package / "add-1.lua"
    body = "return redis.call('INCRBY', KEYS[1], ARGV[1])\n"
    path.write_text(HEADER.replace(without, "") + body)
    (problem,) = problems(path)
    assert says in problem


def test_a_part_that_says_nothing_is_a_problem(package: Path) -> None:
    path = package / "go-0.lua"
    path.write_text("-- Goes.\n-- Returns:\n\nreturn 1\n")
    assert [p.rpartition(" ")[2] for p in problems(path)] == ["Returns", "Clauses"]


def test_a_script_without_a_header_and_with_wrong_keys_has_both_problems(package: Path) -> None:
    path = package / "go-2.lua"
    path.write_text("return KEYS[1]\n")
    purpose, keys = problems(path)
    assert "purpose" in purpose
    assert "2 keys" in keys


def test_an_include_needs_only_its_purpose(package: Path) -> None:
    path = package / "include" / "now.lua"
    path.write_text("-- The server's clock in milliseconds.\nlocal now = 1\n")
    assert problems(path) == []
    path.write_text("local now = 1\n")
    assert problems(path) != []


def test_a_script_is_read_when_it_is_asked_for_and_not_before(package: Path) -> None:
    (package / "go-0.lua").write_text("return 1")
    (package / "broken-3.lua").write_text("return 1")
    folder = ScriptFolder(package.parent.name)
    assert folder["go"].source == "return 1"
    assert folder["go"] is folder["go"]
    with pytest.raises(KeyError):
        folder["gone"]
    with pytest.raises(UsageError, match="its name says 3 keys"):
        folder["broken"]
    (package / "broken-3.lua").unlink()
    assert (list(folder), len(folder)) == (["go"], 1)
