"""The page about what surrounds handlers: its program, and what it logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.cli.pages import page


@pytest.mark.runs("docs/howto/worker.md:bash", "docs/howto/worker.md:python")
def test_what_the_page_about_the_worker_shows_happens(tmp_path: Path) -> None:
    page("docs/howto/worker.md").run(tmp_path)
