"""The README is true: every bash block runs as written against a real `leasehold up`.

The blocks run in their order in one shell, with port 8470 replaced by a free one. A python block
that begins with `# app.py`, or a javascript block with `// app.mjs`, is that file. A text block
says what the bash block before it prints; `...` stands for anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.cli.conftest import Program

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/start/index.md")
MARK = "=====block====="
PROGRAMS = {"python": ("# ", ".py"), "javascript": ("// ", ".mjs")}


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    found = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [Block(language, text) for language, text in found]


def test_every_block_has_a_language_that_says_what_happens_to_it() -> None:
    for page in PAGES:
        fences = re.findall(r"^```", (ROOT / page).read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), f"{page}: a block without a language"
        assert {block.language for block in blocks(page)} <= {
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


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_order_and_print_what_it_says(
    page: str, folder: Path, free_port: int
) -> None:
    script, expected = ["set -euo pipefail"], []
    for block in blocks(page):
        text = block.text.replace("8470", str(free_port))
        if block.language in PROGRAMS:
            mark, ending = PROGRAMS[block.language]
            name = text.split("\n", 1)[0].removeprefix(mark)
            assert name.endswith(ending), f"the first line of a program names its file: {text}"
            (folder / name).write_text(text)
        elif block.language == "bash":
            script += [text, f"echo; echo {MARK}"]
            expected.append("")
        elif block.language == "text":
            expected[-1] = text
    assert all(expected), f"{page}: a bash block without a text block that says what it prints"
    said = run_bash("\n".join(script), folder).split(f"\n{MARK}\n")
    assert len(said) == len(expected) + 1
    for output, wanted in zip(said[:-1], expected, strict=True):
        assert matches(output, wanted), f"{page} says:\n{wanted}\nbut it prints:\n{output}"


def run_bash(script: str, folder: Path) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LEASEHOLD_")}
    path = f"{Path(sys.executable).parent}:{clean['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=clean | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def matches(output: str, wanted: str) -> bool:
    """Whether the output begins as the text does, `...` standing for anything."""
    pattern = ".*".join(re.escape(part) for part in wanted.strip().split("..."))
    return re.fullmatch(rf"{pattern}.*", output.replace("\r", "").strip(), re.DOTALL) is not None


def test_six_lines_of_node_meet_six_lines_of_python() -> None:
    for name in ("// feed.mjs", "# films.py"):
        (block,) = (block.text for block in blocks("README.md") if block.text.startswith(name))
        assert len([line for line in block.splitlines()[1:] if line.strip()]) == 6


def test_the_two_commands_are_there() -> None:
    console = [block.text for block in blocks("README.md") if block.language == "console"]
    named = re.findall(r"^\$ (\S+)", "".join(console), re.MULTILINE)
    assert named == ["bin/up", "bin/test"]
    assert all(os.access(ROOT / name, os.X_OK) for name in named)
