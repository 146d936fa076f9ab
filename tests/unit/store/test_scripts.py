"""The loader of Lua files: what it puts together, and what it refuses."""

import hashlib
from pathlib import Path

import pytest

from tenure.core.errors import UsageError
from tenure.store.redis import ScriptFolder, load_script


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
    return {name: s.source for name, s in ScriptFolder(lua.parent.name).items()}


def test_a_script_has_its_name_keys_and_hash_from_its_file(package: Path) -> None:
    source = "return redis.call('INCR', KEYS[1]) + #KEYS[2]"
    (package / "add_one-2.lua").write_text(source)
    script = ScriptFolder(package.parent.name)["add_one"]
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
        list(ScriptFolder("tenure.core"))


def test_a_comment_inside_a_string_does_not_hide_a_key(package: Path) -> None:
    (package / "go-1.lua").write_text("return '--' .. KEYS[1]")
    assert load_script(package / "go-1.lua", package / "include").keys == 1


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
    assert (list(folder), len(folder)) == (["broken", "go"], 2)
