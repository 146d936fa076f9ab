"""A real Chromium for tests that look at a page as a person does; without one they fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Page, Playwright, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
PATIENCE_MS = 10_000


@asynccontextmanager
async def opened_page() -> AsyncGenerator[Page]:
    """An empty page of a browser that ends with the block."""
    async with async_playwright() as playwright:
        # Chromium refuses to run as root unless its sandbox is off; nobody else goes without.
        args = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await playwright.chromium.launch(executable_path=program(playwright), args=args)
        try:
            page = await browser.new_page()
            page.set_default_timeout(PATIENCE_MS)
            yield page
        finally:
            await browser.close()


def program(playwright: Playwright) -> str:
    """The machine's own browser, else the one that `playwright install chromium` brought."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    own = playwright.chromium.executable_path
    assert found or Path(own).exists(), (
        "no Chromium: `bin/test interop` brings it by apt where it may; "
        "else `apt-get install chromium` or `playwright install chromium`"
    )
    return found or own
