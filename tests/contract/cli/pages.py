"""Runs what a page of the documentation shows.

The bash blocks run in their order in one shell. A python block that begins with `# app.py`, or a
javascript block with `// app.mjs`, is that file. A text block says what the bash block before it
prints; `...` stands for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tenure.store.embedded import locate_node
from tests.interop.npm import npm

ROOT = Path(__file__).parents[3]
MARK = "=====block====="
PROGRAMS = {"python": ("# ", ".py"), "javascript": ("// ", ".mjs")}


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    text: str


@dataclass(frozen=True)
class Page:
    """A document, or a part of one."""

    name: str
    text: str

    @property
    def blocks(self) -> list[Block]:
        found = re.findall(r"^```(\w+)\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)
        return [Block(language, text) for language, text in found]

    def write_programs(self, folder: Path) -> list[str]:
        """The files that its blocks are, written; their names."""
        names = []
        for block in self.blocks:
            if block.language in PROGRAMS:
                mark, ending = PROGRAMS[block.language]
                name = block.text.split("\n", 1)[0].removeprefix(mark)
                assert name.endswith(ending), f"the first line names its file: {block.text}"
                (folder / name).write_text(block.text)
                names.append(name)
        return names

    def run(self, folder: Path, *, port: int = 8470, **environment: str) -> None:
        """Do what the page says, with another port than 8470; it must print what the page says."""
        self.write_programs(folder)
        script, expected = ["set -euo pipefail"], []
        for block in self.blocks:
            text = block.text.replace("8470", str(port))
            if block.language == "bash":
                script += [text, f"echo; echo {MARK}"]
                expected.append("")
            elif block.language == "text":
                expected[-1] = text
        assert expected, f"{self.name}: nothing to run"
        assert all(expected), f"{self.name}: a bash block without a text that says what it prints"
        said = run_bash("\n".join(script), folder, environment).split(f"\n{MARK}\n")
        assert len(said) == len(expected) + 1
        for output, wanted in zip(said[:-1], expected, strict=True):
            assert matches(output, wanted), f"{self.name} says:\n{wanted}\nbut it prints:\n{output}"


def page(name: str) -> Page:
    """A whole document."""
    return Page(name, (ROOT / name).read_text())


def sections(name: str) -> dict[str, str]:
    """The parts of a document under its `##` headings."""
    parts = re.split(r"^## (.*)\n", (ROOT / name).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def console(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, which follow a `$`, each with what it prints."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    pairs = []
    for part in parts:
        command = re.match(r"(?:.*\\\n)*.*\n?", part)
        assert command is not None
        pairs.append((command[0].strip(), part[command.end() :]))
    return pairs


def run_bash(script: str, folder: Path, environment: dict[str, str]) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TENURE_")}
    path = f"{Path(sys.executable).parent}:{clean['PATH']}"
    if shutil.which("npm") is None:  # the wheel's, which is no program of its own
        node = locate_node()
        path += f":{node.parent}"
        script = f'npm() {{ {shlex.join(npm(node))} "$@"; }}\n{script}'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=clean | {"PATH": path} | environment,
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
