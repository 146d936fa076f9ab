"""The documentation as it is built: without a warning, whole, and with nothing from elsewhere."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from tests.tidy.clauses import clauses_of, specs
from tests.tidy.reading import ROOT, files, text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `bin/docs` builds it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    assert "mkdocs build --quiet --strict" in text(ROOT / "bin" / "docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    for page in files(ROOT / "docs", "*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (site / name).exists()
        assert f'href="{name}"' in home, f"{name} is not in the navigation"
    assert "work is never owned, only leased" in home


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
