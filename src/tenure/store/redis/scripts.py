"""Lua scripts as files: `lua/<operation>-<keys>.lua` of a package, with includes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tenure.core.errors import UsageError
from tenure.store.files import package_folder

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_NAME = re.compile(r"(?P<operation>[A-Za-z][A-Za-z0-9_]*)-(?P<keys>\d+)\.lua")
_INCLUDE = re.compile(r"^[ \t]*--+[ \t]*@include[ \t]+(?P<name>\S+)[ \t]*$", re.MULTILINE)
_COMMENT_OR_STRING = re.compile(
    r"--\[\[.*?\]\]|--[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL
)
_KEYS_INDEX = re.compile(r"\bKEYS\b\s*(?:\[\s*(?P<index>[^\]]*?)\s*\])?")


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script with its includes expanded; `sha` is its hash for EVALSHA."""

    name: str
    keys: int
    source: str = field(repr=False)
    sha: str


class ScriptFolder(Mapping[str, Script]):
    """The scripts of a package by operation; each is read on first use."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._paths: dict[str, Traversable] = {}
        self._read: dict[str, Script] = {}

    def __getitem__(self, operation: str) -> Script:
        script = self._read.get(operation)
        if script is None:
            path = self._listed()[operation]
            includes = package_folder(self._package, "lua") / "include"
            script = self._read[operation] = load_script(path, includes)
        return script

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())

    def _listed(self) -> dict[str, Traversable]:
        if self._paths:
            return self._paths
        paths: dict[str, Traversable] = {}
        folder = package_folder(self._package, "lua")
        for path in sorted(folder.iterdir(), key=lambda path: path.name):
            if path.name.endswith(".lua"):
                operation, _ = _operation_and_keys(path.name)
                if operation in paths:
                    raise UsageError(f"{self._package}: two scripts are called {operation}")
                paths[operation] = path
        if not paths:
            raise UsageError(f"package {self._package} has no lua/<operation>-<keys>.lua")
        self._paths = paths
        return paths


def load_script(path: Traversable, includes: Traversable) -> Script:
    """One script file; its includes are in the folder `includes`."""
    operation, keys = _operation_and_keys(path.name)
    source = _expand(path.read_text(encoding="utf-8"), path.name, includes, (), set())
    used = _keys_used(source, path.name)
    if used != keys:
        raise UsageError(
            f"{path.name}: its name says {keys} keys, its greatest is KEYS[{used}]; "
            f"name it {operation}-{used}.lua or use every key"
        )
    # Redis names scripts by SHA-1; it protects nothing.
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name=operation, keys=keys, source=source, sha=sha)


def strip_comments(source: str) -> str:
    """The code of a script without its comments and the contents of its strings."""
    return _COMMENT_OR_STRING.sub(lambda m: " " if m[0].startswith("--") else '""', source)


def _operation_and_keys(name: str) -> tuple[str, int]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name}: expected <operation>-<number of keys>.lua, such as claim-3.lua")
    return match["operation"], int(match["keys"])


def _expand(
    text: str, name: str, includes: Traversable, chain: tuple[str, ...], done: set[str]
) -> str:
    """`text` with its includes; `chain` is for finding cycles, `done` has those inserted."""

    def included(match: re.Match[str]) -> str:
        include = match["name"]
        if include in chain:
            raise UsageError(f"{name}: includes in a circle: {' -> '.join((*chain, include))}")
        if include in done:
            return f"-- {include} is included above"
        done.add(include)
        for folder in (includes, package_folder("tenure.store", "lua", "include")):
            path = folder / f"{include}.lua"
            if path.is_file():
                body = path.read_text(encoding="utf-8")
                return _expand(body, name, includes, (*chain, include), done)
        raise UsageError(f"{name}: there is no lua/include/{include}.lua to include")

    return _INCLUDE.sub(included, text)


def _keys_used(source: str, name: str) -> int:
    """The greatest n of KEYS[n] in the code."""
    greatest = 0
    for match in _KEYS_INDEX.finditer(strip_comments(source)):
        index = match["index"]
        if index is None or not index.isdigit() or int(index) < 1:
            raise UsageError(
                f"{name}: KEYS is used without a number; write KEYS[1], KEYS[2] ... and pass "
                f"what varies in number as ARGV"
            )
        greatest = max(greatest, int(index))
    return greatest
