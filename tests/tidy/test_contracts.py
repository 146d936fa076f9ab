"""A new contract is a new folder and nothing else: no other code names a contract."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.reading import PACKAGE, SRC, contract_folders, files, listed, shown, tree

CONTRACTS = PACKAGE / "contracts"
NAMES = [folder.name for folder in contract_folders() if folder.name != "memory"]
NAMED = re.compile(
    rf"(?:{'|'.join(NAMES)})(?!.)"  # the name alone
    rf"|.*\b(?:{'|'.join(NAMES)})\+"  # the beginning of a queue URL
    rf"|.*tenure\.contracts\.(?:{'|'.join(NAMES)})\b",
    re.DOTALL,
)
# Names that are no English words as well.
OURS = re.compile(rf"(?:^|_)(?:{'|'.join(set(NAMES) - {'streams', 'plane', 'inbox'})})(?:_|$)")
ALLOWED = {
    ("core/config.py", "streams"): "the contract of the queue that is used by default",
    ("cli/keys.py", "streams"): "the quota of open event streams",
    ("gateway/http/guard.py", "streams"): "the quota of open event streams",
    ("gateway/http/routes.py", "streams"): "routes that keep to the streams of a key",
    ("pipeline/source/journal.py", "streams+redis"): "the example in an error message",
    ("pipeline/source/writing.py", "streams+redis"): "the example in an error message",
}


def elsewhere() -> list[Path]:
    return [path for path in files(SRC, "*.py") if not path.is_relative_to(CONTRACTS)]


def docstrings(module: ast.Module) -> set[ast.AST]:
    """Strings that stand as statements: documentation, in which contracts may be named."""
    return {
        node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def named_in(path: Path) -> Iterator[tuple[int, str]]:
    module = tree(path)
    documentation = docstrings(module)
    for node in ast.walk(module):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in documentation and NAMED.match(node.value):
                yield line, node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            origin = node.module if isinstance(node, ast.ImportFrom) else ""
            for name in [f"{origin}.{alias.name}".lstrip(".") for alias in node.names]:
                if re.match(rf"tenure\.contracts\.(?:{'|'.join(NAMES)})\b", name):
                    yield line, name
        elif isinstance(node, ast.Name | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.id if isinstance(node, ast.Name) else node.name
            if OURS.search(name.lower()):
                yield line, name


def is_allowed(path: Path, found: str) -> bool:
    where = str(path.relative_to(PACKAGE))
    return any(where == file and words in found for file, words in ALLOWED)


def test_no_code_outside_a_contract_s_folder_names_it() -> None:
    problems = [
        f"{shown(path, line)}: {found!r}: read it from the contract's descriptor"
        for path in elsewhere()
        for line, found in named_in(path)
        if not is_allowed(path, found)
    ]
    assert not problems, listed(problems)


def test_every_exception_is_still_needed() -> None:
    unused = [
        f"{file}: {words}"
        for file, words in ALLOWED
        if not any(words in found for _, found in named_in(PACKAGE / file))
    ]
    assert not unused, listed(unused)
