"""The page about the client: its programs and commands, run in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.cli.pages import page

PAGE = "docs/howto/client.md"


@pytest.mark.runs("docs/howto/client.md:bash", "docs/howto/client.md:python")
def test_what_the_page_about_the_client_shows_happens(tmp_path: Path) -> None:
    page(PAGE).run(tmp_path)
