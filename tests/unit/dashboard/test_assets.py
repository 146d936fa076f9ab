"""The files that pages load: those of others unchanged, ours within bounds."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

from tenure.dashboard.app import assets


def test_files_of_others_are_as_they_were_published() -> None:
    listed = (files("tenure.dashboard") / "static" / "VENDORED.md").read_text()
    rows = dict(re.findall(r"^\| (\S+\.(?:js|css)) .* ([0-9a-f]{64}) \|$", listed, re.MULTILINE))
    assert rows.keys() == {"htmx.js", "uplot.js", "uplot.css"}
    for name, digest in rows.items():
        assert hashlib.sha256(assets()[name].content).hexdigest() == digest


def test_a_page_loads_less_than_120_kilobytes_of_script() -> None:
    size = sum(len(asset.content) for name, asset in assets().items() if name.endswith(".js"))
    assert size < 120_000


def test_an_address_changes_with_its_content() -> None:
    paths = [asset.path for asset in assets().values()]
    assert len(set(paths)) == len(paths)
    assert all(re.fullmatch(r"/static/[0-9a-f]{12}/[\w.]+", path) for path in paths)


def test_our_script_keeps_to_the_policy() -> None:
    text = assets()["app.js"].content.decode()
    assert not re.search(r"\beval\(|new Function|innerHTML|https?://", text)
