"""The page about schedules and chains: its programs and commands, run in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.cli.pages import page

PAGE = "docs/howto/schedules.md"


@pytest.mark.runs("docs/howto/schedules.md:bash", "docs/howto/schedules.md:python")
def test_what_the_page_about_schedules_shows_happens(tmp_path: Path) -> None:
    page(PAGE).run(tmp_path)
