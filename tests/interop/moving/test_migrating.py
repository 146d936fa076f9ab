"""The page about moving here is true: the old programs run with the old packages, ours with ours.

Each section of docs/howto/migrating.md is a folder of its own, on one Redis. `old` in it is the
environment of the package that the section is about, as the benchmarks pin it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.environments import binaries
from tenure.store.embedded import EmbeddedRedis
from tests.contract.cli.pages import Page, sections

PAGE = "docs/howto/migrating.md"
PEERS = {
    "From Celery": "celery",
    "From RQ": "rq",
    "From `bullmq` for Python": "bullmq_python",
}


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    server = EmbeddedRedis()
    try:
        yield server.start()
    finally:
        server.stop()


def test_every_section_with_programs_is_run_by_a_test() -> None:
    with_blocks = [name for name, text in sections(PAGE).items() if "```" in text]
    assert with_blocks == list(PEERS)


@pytest.mark.runs("docs/howto/migrating.md:bash", "docs/howto/migrating.md:python")
@pytest.mark.parametrize("section", list(PEERS))
def test_what_the_page_shows_of_the_old_and_the_new_side_happens(
    section: str, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "old").symlink_to(binaries(PEERS[section]).parent)
    page = Page(PAGE, sections(PAGE)[section])
    page.run(tmp_path, REDIS_URL=redis_url)
