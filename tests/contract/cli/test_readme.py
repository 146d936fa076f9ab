"""The README is true: every block of it runs as written against a real `tenure up`.

How blocks are run, and what their languages mean, is in `pages`.
"""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.cli.box import Box
from tests.contract.cli.conftest import Program
from tests.contract.cli.pages import ROOT, console, matches, page, run_bash

PAGES = ("README.md", "docs/start/index.md")
TUTORIAL = "docs/start/tutorial.md"


def test_every_block_has_a_language_that_says_what_happens_to_it() -> None:
    for name in PAGES:
        fences = re.findall(r"^```", page(name).text, re.MULTILINE)
        assert len(fences) == 2 * len(page(name).blocks), f"{name}: a block without a language"
        assert {block.language for block in page(name).blocks} <= {
            "bash",
            "console",
            "javascript",
            "mermaid",
            "python",
            "text",
            "toml",
        }


@pytest.fixture
def up(tmp_path: Path, free_port: int) -> Iterator[Callable[..., Path]]:
    """Starts `tenure up` in the test's folder, as a page says."""
    programs: list[Program] = []

    def begin(*words: str) -> Path:
        args = ["up", *words, "--port", str(free_port), "--no-node"]
        programs.append(Program(args, tmp_path, {}))
        programs[-1].heard("tenure is up")
        return tmp_path

    yield begin
    for program in programs:
        program.kill()


@pytest.fixture
def box(tmp_path: Path, free_port: int) -> Iterator[Box]:
    box = Box(tmp_path / "box", ROOT, redis_port=free_port, gateway_port=free_port + 1)
    yield box
    box.stop()


@pytest.mark.runs("docs/start/index.md:bash", "docs/start/index.md:python")
def test_what_the_start_shows_happens_as_it_is_written(
    up: Callable[..., Path], free_port: int
) -> None:
    page("docs/start/index.md").run(up(), port=free_port)


@pytest.mark.runs("README.md:bash", "README.md:python", "README.md:javascript")
def test_what_the_readme_shows_happens_and_your_own_job_is_a_bar_on_its_page(
    up: Callable[..., Path], tmp_path: Path, free_port: int
) -> None:
    readme = page("README.md")
    assert "start `bin/up app.py`" in readme.text
    readme.write_programs(tmp_path)
    readme.run(up("app.py"), port=free_port)
    link = re.search(r"http://127.0.0.1:8470(/jobs\?q=task:greet)", readme.text)
    assert link is not None
    listed = read(free_port, link[1])
    by_command_and_client = re.findall(r'data-href="(/jobs/streams/[^"]+)"', listed)
    assert len(by_command_and_client) == 2
    for path in by_command_and_client:
        job = read(free_port, path)
        assert 'class="timeline"' in job
        assert "Hello, Ada!" in job
        assert "half way" in job


def read(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        return str(answer.read().decode())


def test_six_lines_of_node_meet_six_lines_of_python() -> None:
    blocks = page("README.md").blocks
    for name in ("// feed.mjs", "# films.py"):
        (block,) = (block.text for block in blocks if block.text.startswith(name))
        assert len([line for line in block.splitlines()[1:] if line.strip()]) == 6


@pytest.mark.runs("README.md:console", "docs/start/index.md:console")
def test_the_two_commands_are_there() -> None:
    """tests/tidy/test_commands.py runs both, in a copy without network."""
    for name, wanted in (("README.md", ["git", "bin/up", "bin/test"]), (PAGES[1], ["bin/up"])):
        console = [block.text for block in page(name).blocks if block.language == "console"]
        named = re.findall(r"^\$ (\S+)", "".join(console), re.MULTILINE)
        assert named == wanted
    assert all(os.access(ROOT / name, os.X_OK) for name in ("bin/up", "bin/test"))


@pytest.mark.runs("docs/start/tutorial.md:bash", "docs/start/tutorial.md:python")
def test_the_tutorial_works_from_a_handler_to_its_test(
    up: Callable[..., Path], free_port: int
) -> None:
    page(TUTORIAL).run(up("--no-samples"), port=free_port)


@pytest.mark.runs("docs/start/tutorial.md:console")
def test_the_worker_of_the_tutorial_is_deployed_and_runs_a_job(
    box: Box, tmp_path: Path, free_port: int
) -> None:
    starts, install, deploy = [b.text for b in page(TUTORIAL).blocks if b.language == "console"]
    assert console(starts)[0][0] == "bin/up --no-samples"
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "deploy").symlink_to(ROOT / "deploy")
    page(TUTORIAL).write_programs(folder)
    for command, wanted in [*console(install), *console(deploy)]:
        said = run_bash(box.here(command), folder, box.environment)
        assert not wanted or matches(said, wanted), said
