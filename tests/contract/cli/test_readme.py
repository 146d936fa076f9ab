"""The README is true: every block of it runs as written against a real `leasehold up`.

How blocks are run, and what their languages mean, is in `pages`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.cli.conftest import Program
from tests.contract.cli.pages import ROOT, page

PAGES = ("README.md", "docs/start/index.md")


def test_every_block_has_a_language_that_says_what_happens_to_it() -> None:
    for name in PAGES:
        fences = re.findall(r"^```", page(name).text, re.MULTILINE)
        assert len(fences) == 2 * len(page(name).blocks), f"{name}: a block without a language"
        assert {block.language for block in page(name).blocks} <= {
            "bash",
            "console",
            "javascript",
            "python",
            "text",
            "toml",
        }


@pytest.fixture
def folder(tmp_path: Path, free_port: int) -> Iterator[Path]:
    """A folder in which `leasehold up` runs."""
    program = Program(["up", "--port", str(free_port), "--no-node"], tmp_path, {})
    try:
        program.heard("leasehold is up")
        yield tmp_path
    finally:
        program.kill()


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run_in_order_and_print_what_it_says(
    name: str, folder: Path, free_port: int
) -> None:
    page(name).run(folder, port=free_port)


def test_six_lines_of_node_meet_six_lines_of_python() -> None:
    blocks = page("README.md").blocks
    for name in ("// feed.mjs", "# films.py"):
        (block,) = (block.text for block in blocks if block.text.startswith(name))
        assert len([line for line in block.splitlines()[1:] if line.strip()]) == 6


def test_the_two_commands_are_there() -> None:
    console = [block.text for block in page("README.md").blocks if block.language == "console"]
    named = re.findall(r"^\$ (\S+)", "".join(console), re.MULTILINE)
    assert named == ["bin/up", "bin/test"]
    assert all(os.access(ROOT / name, os.X_OK) for name in named)
