"""The pictures in docs/start are made by this test, so they show what there is.

Run it with TENURE_SHOTS=1 to write them; otherwise it only proves that each can be made. The
history is that of the folder `lake`: what capture, tables and audit of the pipeline made of ten
minutes of `tenure up`, without the tables that no page reads.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tenure.core.job import NewJob
from tests.browser.stand import Stand

FOLDER = Path(__file__).parents[2] / "docs" / "start" / "images"


def shoot(page: Page, name: str) -> None:
    path = FOLDER / f"{name}.png" if os.environ.get("TENURE_SHOTS") else None
    image = page.screenshot(path=path)
    assert image.startswith(b"\x89PNG")


def test_each_page_can_be_shown_in_the_documentation(
    stand: Stand, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(__file__).parent / "lake", tmp_path / "lake")
    monkeypatch.chdir(tmp_path)  # the page shows the name of the folder
    stand.open(lake="lake")
    stand.work()
    page.set_viewport_size({"width": 1280, "height": 860})
    failed = ""
    for contract in stand.stages:
        jobs = [
            NewJob(task=task, payload=b'{"name":"Ada","token":"secret"}', max_attempts=3)
            for task in ("greet", "greet", "boom", "greet", "reject", "slow")
        ]
        ids = stand.submit(contract, *jobs)
        stand.wait_for(contract, ids[2], ("failed",))
        failed = failed or f"/jobs/{stand.names[contract]}/{ids[2]}"
    hook = {"status_webhook_url": "https://hooks.example/jobs"}
    (told,) = stand.submit("inbox", NewJob(task="greet", payload=b"{}", options=hook))
    stand.wait_for("inbox", told, ("done",))
    for name, path in (
        ("overview", "/"),
        ("jobs", "/jobs"),
        ("job", failed),
        ("queues", "/queues"),
        ("workers", "/workers"),
        ("dead", "/dead"),
        ("outbox", "/outbox"),
        ("history", "/history"),
        ("audit", "/audit"),
    ):
        page.goto(stand.url + path)
        expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
        if name == "job":  # a traceback names the folders of the machine it was made on
            page.locator(".fault summary").click()
        if name == "history":
            for text in ("no loss: at the end every job has ended", "video-generation"):
                expect(page.locator("main")).to_contain_text(text)
        shoot(page, name)
        if name == "queues":  # an action, for the page that keeps them
            for verb in ("pause", "resume"):
                page.locator(f'form[action="/ui/queue"] button[value="{verb}"]').first.click()
                expect(page.locator(".notice").first).to_contain_text(f"is {verb}d")
    page.emulate_media(color_scheme="dark")
    page.goto(stand.url)
    expect(page.locator("#chart canvas")).to_be_visible()
    shoot(page, "overview-dark")


def test_the_start_shows_every_picture_there_is() -> None:
    shown = re.findall(r"\]\(images/(\S+)\.png\)", (FOLDER.parent / "index.md").read_text())
    assert sorted(shown) == sorted(path.stem for path in FOLDER.glob("*.png"))
    pages = {"overview", "jobs", "job", "queues", "workers", "dead", "outbox", "history", "audit"}
    assert pages <= set(shown)
