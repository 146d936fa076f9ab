"""The documentation as it is built: without a warning, whole, and with nothing from elsewhere."""

import re
from html import unescape
from pathlib import Path

import pytest

from tests.documentation import BUILD_S, COMMAND, built_site
from tests.tidy.clauses import clauses_of, specs
from tests.tidy.reading import ROOT, coded_row, files, row_anchor, text
from tests.tidy.test_public_names import NAMES

pytestmark = pytest.mark.timeout(BUILD_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `bin/docs` builds it."""
    assert " ".join(COMMAND[2:]) in text(ROOT / "bin" / "docs")
    return built_site(tmp_path_factory)


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    for page in files(ROOT / "docs", "*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (site / name).exists()
        assert f'href="{name}"' in home, f"{name} is not in the navigation"
    assert "Background jobs for Python" in home


def test_the_python_reference_has_every_public_name(site: Path) -> None:
    """Values such as a default application are not in it: they have no docstring."""
    page = (site / "reference" / "python.html").read_text()
    there = set(re.findall(r'<h\d id="([\w.]+)"', page))
    values = {("tenure.webhooks", "HEADERS"), ("tenure.gateway", "app")}
    names = {f"{module}.{name}" for module, name in [*NAMES] if (module, name) not in values}
    # `tenure.worker` has a module of the same name, so this one is documented where it is defined.
    there |= {"tenure.task"} if "tenure.worker.decorator.task" in there else set()
    assert names - there == set()


@pytest.mark.parametrize("name", ["errors", "logs"])
def test_every_code_and_log_event_has_an_anchor(site: Path, name: str) -> None:
    page = (site / "reference" / f"{name}.html").read_text()
    source = text(ROOT / "docs" / "reference" / f"{name}.md")
    codes = {row_anchor(code) for line in source.splitlines() if (code := coded_row(line))}
    assert len(codes) > 50
    assert codes <= set(re.findall(r'<code id="([^"]+)"', page))


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.parent.name)
def test_the_page_of_a_contract_shows_each_clause_with_its_tests(site: Path, spec: Path) -> None:
    page = site / "contracts" / f"{spec.parent.name}.html"
    if spec.parent.name == "memory":  # the reference has no page of its own
        assert not page.exists()
        return
    table = unescape(page.read_text()).partition('id="clauses-and-their-tests"')[2]
    rows = dict(re.findall(r"<tr>\s*<td>([A-Z]-\d+)</td>(.*?)</tr>", table, re.DOTALL))
    assert list(rows) == clauses_of(spec)
    assert all("tests/" in row for row in rows.values())


def test_no_page_asks_for_anything_outside_its_folder(site: Path) -> None:
    asked = re.compile(r'<(?:script|img|iframe|link)[^>]*?(?:src|href)="(https?:)?//[^"]*"')
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    found = [
        f"{page.name}: {match[0]}" for page in pages for match in asked.finditer(page.read_text())
    ]
    assert not found
