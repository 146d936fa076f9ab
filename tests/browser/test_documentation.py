"""The documentation in a real browser: readable in light and dark, diagrams drawn, tables that fit.

It is served from this machine; a page that asks for anything else fails its test.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.test_conduct import AXE
from tests.documentation import BUILD_S, built_site
from tests.interop.npm import installed

# One page of each kind: the README, code and tables, diagrams, codes, docstrings, wide tables.
PAGES = (
    "index.html",
    "howto/client.html",
    "contracts/plane.html",
    "reference/errors.html",
    "reference/python.html",
    "concepts/comparison.html",
)
SCHEMES = ("light", "dark")
pytestmark = pytest.mark.timeout(BUILD_S)


class Quiet(SimpleHTTPRequestHandler):
    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Nothing: pytest's output is no access log."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    handler = partial(Quiet, directory=str(built_site(tmp_path_factory)))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_axe_finds_no_contrast_failure_in_the_documentation_in_light_and_dark(
    site: str, page: Page
) -> None:
    installed(AXE)
    script = (AXE / "node_modules" / "axe-core" / "axe.min.js").read_text()
    problems = []
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for path in PAGES:
            page.goto(site + path)
            page.evaluate(f"() => {{ {script} }}")
            found = page.evaluate("async () => (await axe.run()).violations")
            problems += [
                f"{scheme} {path}: {each['id']} {len(each['nodes'])} times, such as "
                f"{each['nodes'][0]['html'][:120]} {each['nodes'][0]['any'][:1]}"
                for each in found
                if each["impact"] in ("serious", "critical")
            ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", ["index.html", "contracts/plane.html"])
def test_the_diagrams_of_a_page_are_drawn_without_another_host(
    site: str, page: Page, path: str
) -> None:
    page.goto(site + path)
    page.wait_for_function("() => !document.querySelector('pre.mermaid')")
    drawn = page.locator("div.mermaid")
    assert drawn.count() == Path(path).stem.count("index") + 4 * Path(path).stem.count("plane")
    for each in drawn.all():
        box = each.bounding_box()
        assert box is not None
        assert box["height"] > 60, "an empty drawing"


def test_dark_mode_follows_the_system_and_search_finds_a_page(site: str, page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto(site)
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    page.get_by_placeholder("Search").fill("idempotency")
    expect(page.locator(".md-search-result__link").first).to_be_attached(timeout=15_000)


@pytest.mark.parametrize("width", [1440, 390])
def test_no_page_of_the_documentation_is_wider_than_its_window(
    site: str, page: Page, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for path in PAGES:
        page.goto(site + path)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{path} is {wide} wide"


def test_the_comparison_of_the_figures_fits_on_one_screen(site: str, page: Page) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(site + "concepts/comparison.html")
    box = page.locator("article table").first.bounding_box()
    assert box is not None
    assert box["height"] < 900
