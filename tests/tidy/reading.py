"""Reads the project's own files for this suite, as text and as syntax trees; imports none."""

import ast
import fnmatch
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "tenure"
TESTS = ROOT / "tests"
CONTRACTS = PACKAGE / "contracts"

MADE_BY_TOOLS = {"__pycache__", "node_modules", "dist", "build"}


def is_ours(folder: str) -> bool:
    """Tools keep their things in folders with a dot; `.ci` is the one such folder of ours."""
    return folder == ".ci" or not (folder.startswith(".") or folder in MADE_BY_TOOLS)


def files(top: Path, pattern: str) -> list[Path]:
    """The project's own files below a folder: nothing that a tool put there."""
    found: list[Path] = []
    for folder, folders, names in os.walk(top):
        folders[:] = filter(is_ours, folders)
        found += (Path(folder, name) for name in fnmatch.filter(names, pattern))
    return sorted(found)


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path), filename=str(path))


def shown(path: Path, line: int | None = None) -> str:
    """A place as editors open it: `src/tenure/core/job.py:12`."""
    name = path.relative_to(ROOT).as_posix()
    return name if line is None else f"{name}:{line}"


def listed(problems: list[str]) -> str:
    return "\n".join(["", *problems])


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def claims_in(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (function for function in functions(path) if function.name.startswith("test"))


def contract_folders() -> list[Path]:
    """Each contract is a folder, so a folder with any file of ours in it is one."""
    return sorted(
        path
        for path in CONTRACTS.iterdir()
        if path.is_dir() and is_ours(path.name) and files(path, "*")
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def coded_row(line: str) -> str:
    """The code that a row of a table begins with: an error code or a log event."""
    match = re.match(r"\| `([^`]+)` \|", line)
    return match[1] if match else ""


def row_anchor(code: str) -> str:
    """The anchor of such a row in the built site; codes keep their underscores and their case."""
    return re.sub(r"[^\w]+", "-", code).strip("-")
