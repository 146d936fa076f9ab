"""Every button does what it says, and is written down."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tenure.core.job import NewJob
from tenure.core.portable import portable_counts, state_of
from tenure.core.seam import Query
from tests.browser.conftest import Watched
from tests.browser.stand import CONTRACTS, Stand
from tests.contract.unwanted import given_up


def waiting(count: int, task: str = "greet") -> list[NewJob]:
    return [NewJob(task=task, payload=b'{"n":%d}' % number) for number in range(count)]


def job_page(stand: Stand, contract: str, job_id: str) -> str:
    return f"{stand.url}/jobs/{stand.names[contract]}/{job_id}"


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_job_is_cancelled_retried_and_removed_from_its_page(
    contract: str, stand: Stand, page: Page, watched: Watched
) -> None:
    watched.allowed.append("404")  # the page may look once more at the job that it removes
    stand.open(contract)
    (job_id,) = stand.submit(contract, *waiting(1))
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(job_page(stand, contract, job_id))
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.locator(".notice").first).to_contain_text("cancelled")
    assert stand.state(contract, job_id) == "cancelled"
    page.get_by_role("button", name="Retry", exact=True).click()
    expect(page.locator(".notice").first).to_contain_text("sent back")
    assert stand.state(contract, job_id) == "waiting"
    page.get_by_role("button", name="Remove", exact=True).click()
    expect(page).to_have_url(re.compile(r"/jobs\?q="))
    assert stand.state(contract, job_id) == "missing"
    page.goto(f"{stand.url}/audit")
    for word in ("cancel", "retry", "remove"):
        expect(page.locator("tbody")).to_contain_text(word)


def test_a_dialog_that_is_dismissed_removes_nothing(stand: Stand, page: Page) -> None:
    stand.open("streams")
    (job_id,) = stand.submit("streams", *waiting(1))
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    page.goto(job_page(stand, "streams", job_id))
    page.get_by_role("button", name="Remove", exact=True).click()
    page.reload()
    assert asked == ["Remove this job for good?"]
    assert stand.state("streams", job_id) == "waiting"


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_queue_is_paused_and_resumed(contract: str, stand: Stand, page: Page) -> None:
    stand.open(contract)
    page.goto(f"{stand.url}/queues")
    page.locator("tr[data-queue] button").click()
    expect(page.locator("tr[data-queue] .state").first).to_have_text("paused")
    assert stand.ask(contract, lambda ledger: ledger.counts()).paused
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("tr[data-queue] button")).to_contain_text("Pause")
    assert not stand.ask(contract, lambda ledger: ledger.counts()).paused


def test_ticked_jobs_stay_ticked_while_the_page_changes_and_are_acted_on(
    stand: Stand, page: Page
) -> None:
    stand.open("streams")
    first, *_ = stand.submit("streams", *waiting(5))
    page.goto(f"{stand.url}/jobs")
    expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
    page.locator(f'input[value="streams|{first}"]').check()
    stand.submit("streams", *waiting(3))
    expect(page.locator("tr[data-href]")).to_have_count(8)
    expect(page.locator(f'input[value="streams|{first}"]')).to_be_checked()
    expect(page.locator("#ticked")).to_have_text("1")
    page.locator("#act").get_by_role("button", name="Cancel", exact=True).click()
    expect(page.locator(".notice").first).to_contain_text("1 cancelled")
    assert stand.state("streams", first) == "cancelled"


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_whole_search_is_acted_on_with_the_count_in_the_confirmation(
    contract: str, stand: Stand, page: Page
) -> None:
    stand.open(contract)
    stand.submit(contract, *waiting(30), *waiting(12, task="slow"))
    page.goto(f"{stand.url}/jobs?q=task:slow+is:waiting")
    page.get_by_role("link", name="Cancel all…").click()
    expect(page.locator("#count")).to_have_text("12")
    page.get_by_role("button", name="Cancel 12 jobs").click()
    expect(page.locator("#bulk-state")).to_have_attribute("data-state", "finished")
    expect(page.locator("#bulk-state")).to_contain_text("12 done")
    found = stand.ask(contract, lambda ledger: ledger.find(Query(limit=100)))
    states = [(job.task, state_of(job)) for job in found.jobs]
    assert states.count(("greet", "waiting")) == 30
    assert ("slow", "waiting") not in states


def test_a_long_action_shows_its_progress_and_can_be_stopped(stand: Stand, page: Page) -> None:
    stand.open("streams")
    for _ in range(18):
        stand.submit("streams", *waiting(500))

    def left() -> int:
        return stand.ask("streams", lambda ledger: ledger.counts()).states["queued"]

    page.goto(f"{stand.url}/jobs/confirm?verb=remove&q=is:waiting")
    expect(page.locator("#count")).to_have_text("9 000")
    page.get_by_role("button", name="Remove 9 000 jobs").click()
    while left() == 9_000:  # the first of them is removed
        assert page.locator("#bulk-state").get_attribute("data-state") == "running"
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#bulk-state")).to_have_attribute("data-state", "stopped")
    assert 0 < left() < 9_000


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_job_is_replayed_with_an_edited_payload_and_keeps_its_masked_values(
    contract: str, stand: Stand, page: Page
) -> None:
    stand.open(contract)
    payload = b'{"name":"Ada","token":"tok-1"}'
    (job_id,) = stand.submit(contract, NewJob(task="greet", payload=payload))
    page.goto(job_page(stand, contract, job_id))
    page.locator("#replay summary").click()
    box = page.locator("#replay textarea")
    assert "tok-1" not in box.input_value()
    box.fill(box.input_value().replace("Ada", "Grace"))
    page.get_by_role("button", name="Replay").click()
    expect(page.locator(".notice").first).to_contain_text(f"Replay of {job_id}")
    new_id = page.locator("#live").get_attribute("data-job")
    assert new_id != job_id
    job = stand.ask(contract, lambda ledger: ledger.get(str(new_id)))
    assert job is not None
    assert json.loads(job.payload) == {"name": "Grace", "token": "tok-1"}


def test_a_payload_that_is_no_json_is_refused_with_a_reason(stand: Stand, page: Page) -> None:
    stand.open("streams")
    (job_id,) = stand.submit("streams", *waiting(1))
    page.goto(job_page(stand, "streams", job_id))
    page.locator("#replay summary").click()
    page.locator("#replay textarea").fill("{nope")
    page.get_by_role("button", name="Replay").click()
    expect(page.locator(".notice").first).to_contain_text("the payload is not JSON")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_job_is_sent_from_the_overview(contract: str, stand: Stand, page: Page) -> None:
    stand.open(contract)
    page.goto(stand.url)
    form = page.locator("#try-1 form")
    form.locator("[name=task]").fill("greet")
    form.locator("[name=payload]").fill('{"name": "Lin"}')
    form.get_by_role("button", name="Send").click()
    expect(page.locator("h1")).to_contain_text("greet")
    expect(page.locator("#payload")).to_contain_text("Lin")


def test_dead_letters_are_grouped_by_error_class_and_sent_back_together(
    stand: Stand, page: Page
) -> None:
    stand.open("bullmq")
    stand.work()
    ids = stand.submit("bullmq", *[NewJob(task="reject", payload=b"{}") for _ in range(4)])
    for job_id in ids:
        stand.wait_for("bullmq", job_id, ("failed",))
    page.goto(f"{stand.url}/dead")
    row = page.locator("tbody tr")
    expect(row).to_have_count(1)
    expect(row.locator("td.n")).to_have_text("4")
    row.get_by_role("link", name="Retry all…").click()
    page.get_by_role("button", name="Retry 4 jobs").click()
    expect(page.locator("#bulk-state")).to_contain_text("4 done")


def test_an_event_that_was_given_up_is_delivered_again(stand: Stand, page: Page) -> None:
    stand.open("inbox")
    url = stand.stages["inbox"].url
    event_id = stand.run(given_up(url))
    page.goto(stand.url)
    page.get_by_role("link", name="Outbox").click()
    page.get_by_role("link", name="given up").click()
    row = page.locator("tbody tr", has_text=event_id)
    expect(row).to_contain_text("410 Gone")
    expect(row).to_contain_text("https://hooks.example/jobs")
    expect(row).not_to_contain_text("hidden-word")
    expect(row).not_to_contain_text("me:pw")
    page.get_by_label(f"Tick {event_id}").check()
    page.get_by_role("button", name="Deliver again").click()
    expect(page.locator(".notice").first).to_contain_text("1 to be sent again")
    page.get_by_role("link", name="waiting", exact=True).click()
    expect(page.locator("tbody tr", has_text=event_id)).to_contain_text("claimed")
    page.goto(f"{stand.url}/audit")
    expect(page.locator("tbody")).to_contain_text("redeliver")


def test_what_the_boxes_offer_runs_as_it_is_copied(stand: Stand, page: Page) -> None:
    """Except Node's, for which there is a package to install; tests/interop runs that one."""
    stand.open()
    page.goto(stand.url)
    ran = 0
    for box in page.locator("details[id^=try-]").all():
        for name, text in zip(
            box.locator("p.quiet").all_text_contents(), box.locator("pre").all_text_contents(),
            strict=True,
        ):  # fmt: skip
            if not name.startswith("Node"):
                told = run_copied(text, is_python=name.startswith("Python"))
                assert told.strip(), f"{name} prints nothing:\n{text}"
                ran += 1
    assert ran == 2 * len(CONTRACTS) + 3
    for contract in CONTRACTS:
        counts = stand.ask(contract, lambda ledger: ledger.counts())
        states = portable_counts(contract, counts.states)
        assert states["waiting"] == 2 + (contract in ("streams", "omniq", "plane")), contract


def run_copied(text: str, *, is_python: bool) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = [sys.executable, "-c", text] if is_python else ["bash", "-c", text]
    done = subprocess.run(
        words, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout
