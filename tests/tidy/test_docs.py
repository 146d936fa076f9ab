"""The documents: fenced blocks say their language, links lead somewhere, no machine's paths."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from tenure.cli.project import described
from tests.tidy.reading import (
    ROOT,
    TESTS,
    coded_row,
    files,
    listed,
    row_anchor,
    shown,
    text,
    tree,
)

DOCUMENTS = files(ROOT, "*.md")
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*(\S*)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")


def fences(document: Path) -> list[tuple[int, str]]:
    """The opening fences of a document: line number and language."""
    found: list[tuple[int, str]] = []
    closing = ""
    for number, line in enumerate(text(document).splitlines(), 1):
        match = FENCE.match(line)
        if not match:
            continue
        if not closing:
            closing = match[1]
            found.append((number, match[2]))
        elif match[1].startswith(closing) and not match[2]:
            closing = ""
    assert not closing, f"{shown(document)}: a fenced block is never closed"
    return found


def prose(document: Path) -> list[tuple[int, str]]:
    """The lines outside fenced blocks, without code spans, with their numbers."""
    lines, closing = [], ""
    for number, line in enumerate(text(document).splitlines(), 1):
        match = FENCE.match(line)
        if match and not closing:
            closing = match[1]
        elif match and match[1].startswith(closing):
            closing = ""
        elif not closing:
            lines.append((number, re.sub(r"`[^`]*`", "", line)))
    return lines


def anchors(document: Path) -> set[str]:
    """The anchors that a forge makes from headings, and those of coded rows in the built site."""
    outside = {number for number, _ in prose(document)}
    found: set[str] = set()
    for number, line in enumerate(text(document).splitlines(), 1):
        match = HEADING.match(line) if number in outside else None
        if match:
            words = re.sub(r"[^\w\s-]", "", match[1].lower())
            found.add(re.sub(r"\s", "-", words.strip()))
        if code := coded_row(line):
            found.add(row_anchor(code))
    return found


def broken(document: Path, link: str) -> str | None:
    """Why a relative link leads nowhere, or None."""
    name, _, anchor = unquote(link).partition("#")
    target = (document.parent / name).resolve() if name else document
    if not target.exists():
        return "no such file"
    if not target.is_relative_to(ROOT):
        return "leads out of the project"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        return f"{target.name} has no heading #{anchor}"
    return None


def test_the_table_of_rights_is_what_the_routes_declare() -> None:
    page = text(ROOT / "docs" / "reference" / "rights.md")
    again = "run: tenure api rights > docs/reference/rights.md"
    assert page == described("rights").decode() + "\n", again


def test_the_table_of_features_is_what_the_contracts_declare() -> None:
    page = text(ROOT / "docs" / "contracts" / "features.md")
    command = [sys.executable, str(ROOT / "bin" / "features.py")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert page == made, "run: .venv/bin/python bin/features.py > docs/contracts/features.md"


def test_every_fenced_block_of_the_readme_names_its_language() -> None:
    readme = ROOT / "README.md"
    problems = [shown(readme, number) for number, language in fences(readme) if not language]
    assert not problems, listed(problems)


# What is drawn or printed: a `text` stands beside what prints it, a diagram is drawn by a test.
NOT_RUN = {"", "text", "mermaid"}


def marked() -> set[str]:
    """The blocks, as page:language, that tests say they run."""
    return {
        argument.value
        for path in files(TESTS, "*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "runs"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def test_every_code_block_of_the_documentation_is_run_by_a_test() -> None:
    documents = [ROOT / "README.md", *files(ROOT / "docs", "*.md")]
    there = {
        f"{shown(document)}:{language}"
        for document in documents
        for _, language in fences(document)
        if language not in NOT_RUN
    }
    run = marked()
    assert not run - there, f"no such blocks: {listed(sorted(run - there))}"
    assert not there - run, listed(sorted(there - run))


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_every_relative_link_of_a_document_resolves(document: Path) -> None:
    problems = [
        f"{shown(document, number)}: {link}: {why}"
        for number, line in prose(document)
        for link in LINK.findall(line)
        if not re.match(r"[a-z][a-z0-9+.-]*:", link) and (why := broken(document, link))
    ]
    assert not problems, listed(problems)
