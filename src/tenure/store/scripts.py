"""Lua scripts as files: `lua/<operation>-<keys>.lua` beside the code that runs them.

The number in the name is the number of KEYS, and the loader checks it, so that a script and its
caller cannot drift apart in silence. `-- @include name` on a line of its own puts
`lua/include/name.lua` there, once a script however often it is asked for; what several contracts
share is in the same folder beside this module.

Each file opens with a comment that tells its purpose, then `KEYS[n]`, `ARGV`, `Returns` and
`Clauses`; `problems` says what such a header lacks.
"""

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
    from pathlib import Path

_NAME = re.compile(r"(?P<operation>[A-Za-z][A-Za-z0-9_]*)-(?P<keys>\d+)\.lua")
_INCLUDE = re.compile(r"^[ \t]*--+[ \t]*@include[ \t]+(?P<name>\S+)[ \t]*$", re.MULTILINE)
_COMMENT_OR_STRING = re.compile(
    r"--\[\[.*?\]\]|--[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL
)
_KEYS_INDEX = re.compile(r"\bKEYS\b\s*(?:\[\s*(?P<index>[^\]]*?)\s*\])?")
_HEADER = re.compile(
    r"\A\s*(?:--\[\[(?P<block>.*?)\]\]|(?P<lines>(?:[ \t]*--[^\n]*(?:\n|\Z))+))", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, its includes expanded; `sha` is what EVALSHA takes."""

    name: str
    keys: int
    source: str = field(repr=False)
    sha: str


class ScriptFolder(Mapping[str, Script]):
    """The scripts of a package by operation, each read when it is first asked for.

    A command that only looks at a queue runs none of them, and shall not wait for them to be read.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._read: dict[str, Script] = {}

    def __getitem__(self, operation: str) -> Script:
        if operation not in self._read:
            self._read[operation] = self._one(operation)
        return self._read[operation]

    def __iter__(self) -> Iterator[str]:
        return iter(load_scripts(self._package))

    def __len__(self) -> int:
        return len(load_scripts(self._package))

    def _one(self, operation: str) -> Script:
        folder = package_folder(self._package, "lua")
        found = [path for path in folder.iterdir() if path.name.startswith(f"{operation}-")]
        if len(found) != 1:
            raise KeyError(operation)
        return load_script(found[0], folder / "include")


def load_scripts(package: str) -> dict[str, Script]:
    """All scripts of a package's `lua` folder, by operation; anything wrong with one raises."""
    folder = package_folder(package, "lua")
    scripts: dict[str, Script] = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not entry.name.endswith(".lua"):
            continue
        script = load_script(entry, folder / "include")
        if script.name in scripts:
            raise UsageError(f"{package}: two scripts are called {script.name}; rename one")
        scripts[script.name] = script
    if not scripts:
        raise UsageError(f"package {package} has no lua/<operation>-<keys>.lua")
    return scripts


def load_script(path: Traversable, includes: Traversable) -> Script:
    """One script file, its includes taken from the folder `includes`."""
    operation, keys = _operation_and_keys(path.name)
    source = _expand(path.read_text(encoding="utf-8"), path.name, includes, (), set())
    used = _keys_used(source, path.name)
    if used != keys:
        raise UsageError(
            f"{path.name}: its name says {keys} keys, its greatest is KEYS[{used}]; "
            f"name it {operation}-{used}.lua or use every key"
        )
    # The protocol's name for a script, not a safeguard.
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name=operation, keys=keys, source=source, sha=sha)


def problems(script_path: Path) -> list[str]:
    """What is wrong with a script's file: name, number of keys, includes, header. [] when nothing.

    A file in a folder `include` only needs an opening comment that says what it is for.
    """
    text = script_path.read_text(encoding="utf-8")
    header = _header(text)
    found = [] if _purpose(header) else ["the header does not open with the script's purpose"]
    if script_path.parent.name == "include":
        return found
    try:
        script = load_script(script_path, script_path.parent / "include")
    except UsageError as error:
        return [*found, str(error)]
    code = _without_comments(script.source)
    wanted = [f"KEYS[{index}]" for index in range(1, script.keys + 1)]
    wanted += ["ARGV"] if re.search(r"\bARGV\b", code) else []
    wanted += ["Returns", "Clauses"]
    return found + [
        f"the header does not tell {part}" for part in wanted if not _tells(header, part)
    ]


def _operation_and_keys(name: str) -> tuple[str, int]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name}: expected <operation>-<number of keys>.lua, such as claim-3.lua")
    return match["operation"], int(match["keys"])


def _expand(
    text: str, name: str, includes: Traversable, chain: tuple[str, ...], done: set[str]
) -> str:
    """`text` with its includes in place; `chain` finds cycles, `done` keeps each include single."""

    def included(match: re.Match[str]) -> str:
        wanted = match["name"]
        if wanted in chain:
            raise UsageError(f"{name}: includes in a circle: {' -> '.join((*chain, wanted))}")
        if wanted in done:
            return f"-- {wanted} is included above"
        done.add(wanted)
        part = _part(wanted, name, includes)
        return _expand(part.read_text(encoding="utf-8"), name, includes, (*chain, wanted), done)

    return _INCLUDE.sub(included, text)


def _part(wanted: str, name: str, includes: Traversable) -> Traversable:
    for folder in (includes, package_folder("tenure.store", "lua", "include")):
        part = folder / f"{wanted}.lua"
        if part.is_file():
            return part
    raise UsageError(f"{name}: there is no lua/include/{wanted}.lua to include")


def _without_comments(source: str) -> str:
    return _COMMENT_OR_STRING.sub(lambda m: " " if m[0].startswith("--") else '""', source)


def _keys_used(source: str, name: str) -> int:
    """The greatest n of KEYS[n] in the code."""
    greatest = 0
    for match in _KEYS_INDEX.finditer(_without_comments(source)):
        index = match["index"]
        if index is None or not index.isdigit() or int(index) < 1:
            raise UsageError(
                f"{name}: KEYS is used without a number; write KEYS[1], KEYS[2] ... and pass "
                f"what varies in number as ARGV"
            )
        greatest = max(greatest, int(index))
    return greatest


def _header(text: str) -> list[str]:
    match = _HEADER.match(text)
    if match is None:
        return []
    lines = (match["block"] or match["lines"]).splitlines()
    return [line.strip().lstrip("-").strip() for line in lines]


def _purpose(header: list[str]) -> bool:
    first = next((line for line in header if line), "")
    return bool(first) and not any(_tells([first], part) for part in ("KEYS", "ARGV", "Returns"))


def _tells(header: list[str], part: str) -> bool:
    """Whether a line opens with `part` and says something, there or on the line after it.

    Keys are short: several may share a line, each followed by its name.
    """
    if part.startswith("KEYS["):
        return any(re.search(re.escape(part) + r"\s+\w", line) for line in header)
    for index, line in enumerate(header):
        if line.startswith(part):
            rest = line[len(part) :].strip(" :[]0123456789")
            return bool(rest) or any(header[index + 1 : index + 2])
    return False
