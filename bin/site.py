"""What the built documentation has besides the files of docs/, as hooks of MkDocs.

The navigation is made from the folders of docs/, so it includes every new page. Files of the
project that a page links to are included, and links between all of them are adapted. The page of
a contract ends with its clauses and the tests that prove each, read from the tests' marks. Rows of
error codes and log events get anchors. Pages with diagrams load Mermaid from the site itself.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.tidy.clauses import CLAUSE_LINE, proofs  # noqa: E402
from tests.tidy.reading import CONTRACTS, coded_row, row_anchor, shown  # noqa: E402

FOLDERS = {
    "start": "Start",
    "concepts": "Concepts",
    "howto": "How to",
    "contracts": "Contracts",
    "operating": "Operating",
    "reference": "Reference",
    "internals": "Internals",
}
PROJECT = {
    "ARCHITECTURE.md": "Architecture",
    "CONTRIBUTING.md": "Contributing",
    "SECURITY.md": "Security policy",
    "CHANGELOG.md": "Changelog",
}
LINK = re.compile(r"(!?\[[^\]]*\]\()(?![a-z][a-z0-9+.-]*:|#)([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)
MERMAID = "assets/mermaid.js"  # the theme would load it from a CDN
WIDE = "concepts/comparison.md"  # its table is to fit on one screen
ANCHORED = {"reference/errors.md", "reference/logs.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation: what docs/ holds, by purpose."""
    docs = ROOT / "docs"
    unknown = {path.relative_to(docs).parts[0] for path in docs.glob("*/**/*.md")} - FOLDERS.keys()
    if unknown:
        raise SystemExit(f"bin/site.py: say in FOLDERS where docs/{unknown.pop()} belongs")
    nav: list[dict[str, object]] = [{"Home": "index.md"}]
    for folder, title in FOLDERS.items():
        found = sorted(
            (docs / folder).rglob("*.md"), key=lambda path: (path.name != "index.md", path)
        )
        pages = [{heading(path): path.relative_to(docs).as_posix()} for path in found]
        nav.append({title: pages})
    nav.append({"The project": [{title: name} for name, title in PROJECT.items()]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Files of the project that pages link to, and what those link to in turn."""
    pages = [ROOT / "README.md", *(ROOT / name for name in PROJECT), *(ROOT / "docs").rglob("*.md")]
    known = {path.resolve() for path in pages}
    while pages:
        page = pages.pop()
        for target in targets(page):
            if target not in known and target.is_file():
                known.add(target)
                pages += [target] if target.suffix == ".md" else []
    for path in sorted(known):
        if not path.is_relative_to(ROOT / "docs"):
            files.append(File.generated(config, address(path), content=path.read_bytes()))
    files.append(File.generated(config, MERMAID, content=mermaid()))
    aside = {address(path) for path in known} - {"index.md", *PROJECT}
    for file in files.documentation_pages():
        if file.src_uri in aside and not file.abs_src_path:
            file.inclusion = file.inclusion.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead to where things are in the site; a contract gets its table."""
    source = origin(page.file.src_uri)
    contract = CONTRACTS / source.stem / "SPEC.md"
    if source.parent == ROOT / "docs" / "contracts" and contract.exists():
        markdown += clause_table(contract)
    if page.file.src_uri == WIDE:
        page.meta["hide"] = ["navigation", "toc"]
    if page.file.src_uri in ANCHORED:
        markdown = anchored(markdown)
    return outside_code(markdown, lambda text: LINK.sub(lambda match: led(match, source), text))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The search is named for screen readers; a page with a diagram loads Mermaid first."""
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
    if 'class="mermaid"' not in output:
        return output
    source = get_relative_url(MERMAID, page.url)
    return output.replace("</head>", f'<script src="{source}"></script></head>', 1)


def mermaid() -> bytes:
    """Mermaid itself, which the package `mermaidx` contains."""
    spec = find_spec("mermaidx")
    if spec is None or spec.origin is None:
        raise SystemExit("bin/site.py: the package mermaidx is not installed: run bin/setup again")
    return (Path(spec.origin).parent / "assets" / "mermaid.js").read_bytes()


def anchored(markdown: str) -> str:
    """Rows that begin with a code, each with an anchor of that name; the first one has it."""
    seen: set[str] = set()
    lines = []
    for line in markdown.split("\n"):
        code = coded_row(line)
        if code and row_anchor(code) not in seen:
            seen.add(row_anchor(code))
            line = line.replace(f"`{code}`", f"`{code}`{{ #{row_anchor(code)} }}", 1)
        lines.append(line)
    return "\n".join(lines)


def led(match: re.Match[str], source: Path) -> str:
    """One link, seen from the page's place in the site."""
    opening, link, anchor, closing = match.groups()
    target = (source.parent / link).resolve()
    here = posixpath.dirname(address(source))
    return f"{opening}{posixpath.relpath(address(target), here or '.')}{anchor or ''}{closing}"


def address(path: Path) -> str:
    """Where a file of the project lies in the site."""
    name = path.relative_to(ROOT).as_posix()
    return "index.md" if name == "README.md" else name.removeprefix("docs/")


def origin(uri: str) -> Path:
    """The file that lies there."""
    if uri == "index.md":
        return ROOT / "README.md"
    inside = ROOT / "docs" / uri
    return inside if inside.exists() else ROOT / uri


def targets(page: Path) -> list[Path]:
    """The files that a page links to."""
    prose = FENCE.split(page.read_text())[::2]
    links = [match[2] for part in prose for match in LINK.finditer(part)]
    return [(page.parent / link).resolve() for link in links]


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Change what is not in a fenced block."""
    parts = FENCE.split(markdown)
    parts[::2] = [change(part) for part in parts[::2]]
    return "".join(parts)


cached_proofs = cache(proofs)


def heading(path: Path) -> str:
    """The first heading of a page, as the navigation shows it."""
    for line in path.read_text().splitlines():
        if line.startswith("# "):
            return line[2:].replace("`", "")
    raise SystemExit(f"bin/site.py: {path.relative_to(ROOT)} has no heading")


def clause_table(spec: Path) -> str:
    """Every clause of a contract and the tests that prove it."""
    known = cached_proofs()
    rows = ["", "", "## Clauses and their tests", "", "| clause | | proved by |", "|---|---|---|"]
    for line in spec.read_text().splitlines():
        match = CLAUSE_LINE.match(line)
        if match:
            words = line.split("** ", 1)[1].replace("|", "\\|")
            tests = "<br>".join(
                f"{name.removeprefix('test_').replace('_', ' ') or 'all of it'} (`{shown(path)}`)"
                for path, name in known[match[1]]
            )
            rows.append(f"| {match[1]} | {words} | {tests} |")
    return "\n".join(rows) + "\n"
