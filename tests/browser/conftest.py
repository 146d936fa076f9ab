"""Real Chromium against a real gateway. A page that asks for anything beyond it fails its test.

Without a Chromium on the PATH these tests fail: what people see is not proved otherwise.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.browser.stand import Loop, Stand
from tests.contract.adapters import Servers

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def loop() -> Generator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    """One a module and no longer: while it is open, no test with a loop of its own can run here."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.fail(f"no browser: put one of {', '.join(PROGRAMS)} on the PATH")
    with sync_playwright() as playwright:
        args = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=args)
        yield browser
        browser.close()


@pytest.fixture
def stand(loop: Loop, servers: Servers) -> Generator[Stand]:
    stand = Stand(loop, servers)
    yield stand
    stand.close()


class Watched:
    """What pages asked for and complained of."""

    def __init__(self) -> None:
        self.strangers: list[str] = []
        self.complaints: list[str] = []
        self.allowed: list[str] = []

    def attach(self, page: Page) -> None:
        page.on("request", lambda request: self._asked(request.url))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("console", lambda message: self._said(message.type, message.text))

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname != "127.0.0.1":
            self.strangers.append(url)

    def _said(self, kind: str, text: str) -> None:
        if kind == "error" and not any(word in text for word in self.allowed):
            self.complaints.append(text)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture(scope="module")
def window(browser: Browser) -> Generator[BrowserContext]:
    """Its first page stays open: with the last one Chromium ends processes that it then misses."""
    window = browser.new_context(viewport={"width": 1280, "height": 900})
    window.new_page()
    yield window
    window.close()


@pytest.fixture
def context(window: BrowserContext, watched: Watched) -> Generator[BrowserContext]:
    """For one test: its cookies go with it, and what else is stored is its gateway's alone."""
    window.on("page", watched.attach)
    yield window
    window.remove_listener("page", watched.attach)
    for page in window.pages[1:]:
        page.close()
    window.clear_cookies()
    assert not watched.strangers, f"asked for things outside: {watched.strangers}"
    assert not watched.complaints, f"the browser complained: {watched.complaints}"


@pytest.fixture
def page(context: BrowserContext) -> Page:
    page = context.new_page()
    page.set_default_timeout(15_000)
    return page


@pytest.fixture
def visit(page: Page) -> Callable[..., Any]:
    """Open a page and make sure that it is one."""

    def visit(url: str, status: int = 200) -> Page:
        answer = page.goto(url)
        assert answer is not None
        assert answer.status == status, f"{url}: {answer.status}"
        return page

    return visit
