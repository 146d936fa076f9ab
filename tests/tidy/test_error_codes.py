"""The catalogue of error codes: every code that the source raises is on the page."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.reading import PACKAGE, ROOT, files, shown, text, tree

PAGE = ROOT / "docs" / "reference" / "errors.md"
LISTED = re.compile(r"^\| `([^`]+)` \|(.*)$", re.MULTILINE)
IN_SQL = re.compile(r'"code":"(\w+)"')
FAMILY = "http_NNN"
# Functions that take a code without its name, and as which argument.
POSITIONAL = {"_given_up": 1}


def constants(node: ast.expr) -> Iterator[str]:
    """The texts that an expression can be; an f-string is the family that it begins."""
    for part in [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.JoinedStr) and isinstance(part.values[0], ast.Constant):
            yield str(part.values[0].value)


def raised(path: Path) -> Iterator[str]:
    """Codes in a module: `code=` of calls, and `code` of classes."""
    named = {
        ast.unparse(line.targets[0]): line.value
        for line in tree(path).body
        if isinstance(line, ast.Assign)
    }
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "code":
                    yield from constants(keyword.value)
            if ast.unparse(node.func) in POSITIONAL:
                code = node.args[POSITIONAL[ast.unparse(node.func)]]
                yield from constants(named.get(ast.unparse(code), code))
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code":
                    yield from constants(line.value)


def problems() -> dict[str, str]:
    """The gateway's own table: code and status."""
    for node in ast.walk(tree(PACKAGE / "gateway" / "problems.py")):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CODES" and node.value:
            return {code: str(status) for code, (status, _) in ast.literal_eval(node.value).items()}
    raise AssertionError("gateway/problems.py has no CODES")


def test_every_error_code_that_is_raised_is_in_the_catalogue() -> None:
    listed = {match[1] for match in LISTED.finditer(text(PAGE))}
    lacking = {}
    for path in [*files(PACKAGE, "*.py"), *files(PACKAGE, "*.sql")]:
        found = raised(path) if path.suffix == ".py" else iter(IN_SQL.findall(text(path)))
        for code in found:
            known = FAMILY if code.startswith("http_") else code
            if code and known not in listed:
                lacking[code] = shown(path)
    assert lacking == {}, f"add them to {shown(PAGE)}"


def test_the_catalogue_has_the_gateways_problems_with_their_statuses() -> None:
    section = text(PAGE).split("## Answers of a gateway")[1].split("\n## ")[0]
    listed = {match[1]: match[2].split("|")[0].strip() for match in LISTED.finditer(section)}
    assert listed == problems()
