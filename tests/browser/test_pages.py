"""Every page with content from every contract."""

from __future__ import annotations

import re
from collections.abc import Generator
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tenure.core.job import NewJob
from tenure.store.redis import Redis
from tests.browser.conftest import Watched
from tests.browser.stand import CONTRACTS, Loop, Stand
from tests.contract.adapters import Servers


@pytest.fixture(scope="module")
def busy(loop: Loop, servers: Servers) -> Generator[Stand]:
    """All contracts, each with a job that succeeded, one that failed and one that runs.

    The tests here only look at it.
    """
    stand = Stand(loop, servers)
    stand.open()
    stand.work()
    for contract in CONTRACTS:
        done, failed, _ = stand.submit(
            contract,
            NewJob(task="greet", payload=b'{"name":"Ada","password":"hunter2"}'),
            NewJob(task="reject", payload=b"{}"),
            NewJob(task="slow", payload=b"{}"),
        )
        stand.wait_for(contract, done, ("done",))
        stand.wait_for(contract, failed, ("failed",))
    yield stand
    stand.close()


def test_every_page_shows_jobs_of_every_contract(busy: Stand, page: Page) -> None:
    names = list(busy.names.values())
    for path in ("/", "/queues"):
        page.goto(busy.url + path)
        for name in names:
            expect(page.locator(f'tr[data-queue="{name}"]')).to_contain_text("1")
    page.goto(f"{busy.url}/jobs")
    expect(page.locator("tr[data-href]")).to_have_count(3 * len(names))
    page.goto(f"{busy.url}/workers")
    for name in names:
        row = page.locator("tbody tr", has_text=name).first
        expect(row).to_contain_text("slow")
        expect(row.locator("td").nth(3)).to_have_text("20")  # slots
    page.goto(f"{busy.url}/dead")
    for name in names:
        expect(page.locator("tbody tr", has_text=name)).to_contain_text("refused")


def test_the_overview_draws_throughput_heat_maps_and_ways_to_submit(
    busy: Stand, page: Page
) -> None:
    page.goto(busy.url)
    expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
    expect(page.locator("#chart canvas")).to_be_visible()
    for heat in page.locator("svg.heat").all():
        expect(heat.locator("rect").first).to_be_attached()
    boxes = page.locator("details[id^=try-]")
    expect(boxes).to_have_count(len(busy.names))
    for name in busy.names.values():
        expect(page.locator("pre", has_text=f"/api/queues/{name}/jobs")).to_have_count(1)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_failed_job_shows_its_attempts_error_and_events(
    contract: str, stand: Stand, page: Page
) -> None:
    stand.open(contract)
    stand.work()
    job = NewJob(task="boom", payload=b'{"n":3,"api_key":"sk-1"}', max_attempts=2)
    (job_id,) = stand.submit(contract, job)
    stand.wait_for(contract, job_id, ("failed",))
    page.goto(f"{stand.url}/jobs/{stand.names[contract]}/{job_id}")
    expect(page.locator("h1")).to_contain_text("boom")
    expect(page.locator(".timeline tr")).to_have_count(2)
    expect(page.locator(".timeline tr").first).to_contain_text("retry")
    expect(page.locator(".timeline tr").last).to_contain_text("failed")
    expect(page.locator(".fault")).to_contain_text("ValueError")
    expect(page.locator(".fault")).to_contain_text("no such thing: 3")
    job = stand.ask(contract, lambda ledger: ledger.get(job_id))
    assert job is not None
    # Not every contract keeps the traceback; where it is kept it is shown.
    expect(page.locator("#stack")).to_have_count(1 if b"Traceback" in job.error else 0)
    expect(page.locator("#payload")).to_contain_text('"n": 3')
    expect(page.locator("#payload")).not_to_contain_text("sk-1")
    assert page.locator("#tail tr").count() >= 3


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_running_job_is_followed_live_to_its_end(contract: str, stand: Stand, page: Page) -> None:
    stand.open(contract)
    (job_id,) = stand.submit(contract, NewJob(task="greet", payload=b'{"name":"Bo"}'))
    page.goto(f"{stand.url}/jobs/{stand.names[contract]}/{job_id}")
    expect(page.locator("h1 .state")).to_have_class(re.compile("k-waiting"))
    expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
    stand.work()
    expect(page.locator("h1 .state")).to_have_class(re.compile("k-done"))
    expect(page.locator("#result")).to_contain_text("Hello, Bo!")
    expect(page.locator("#tail")).to_contain_text("half way")
    expect(page.locator("#percent")).to_contain_text("50")


def test_what_a_handler_says_cannot_become_html(busy: Stand, page: Page) -> None:
    page.goto(f"{busy.url}/jobs?q=is:failed")
    expect(page.locator("tr[data-href]").first).to_contain_text("<b>not HTML</b>")


def test_a_job_that_is_gone_is_said_to_be_gone(stand: Stand, page: Page, watched: Watched) -> None:
    watched.allowed.append("404")
    stand.open("streams")
    answer = page.goto(f"{stand.url}/jobs/streams/no-such-job")
    assert answer is not None
    assert answer.status == 404
    expect(page.locator("main")).to_contain_text("there is no such job")


def test_the_overview_warns_of_steps_that_are_missing_from_a_journal(
    stand: Stand, page: Page
) -> None:
    stand.open("streams")
    stand.work()
    (job_id,) = stand.submit("streams", NewJob(task="greet", payload=b"{}"))
    stand.wait_for("streams", job_id, ("done",))

    async def forget_the_claim() -> int:
        parts = urlsplit(stand.stages["streams"].url.removeprefix("streams+"))
        redis = Redis(parts._replace(query="").geturl())
        try:
            key = f"{parse_qs(parts.query)['namespace'][0]}jobs:journal"
            entries = await redis.call("XRANGE", key, "-", "+")
            (claim,) = (entry for entry in entries if b"claim" in b" ".join(entry[1]))
            return int(await redis.call("XDEL", key, claim[0]))
        finally:
            await redis.close()

    assert stand.run(forget_the_claim()) == 1
    page.goto(stand.url)
    expect(page.locator(".warning")).to_contain_text("a gap in its journal")


def test_queues_show_the_groups_and_priorities_of_what_waits(stand: Stand, page: Page) -> None:
    stand.open("omniq", "bullmq")
    stand.submit("omniq", *[NewJob(task="greet", payload=b"{}", gid="tenant-7")] * 2)
    stand.submit("bullmq", NewJob(task="greet", payload=b"{}", priority=5))
    page.goto(f"{stand.url}/queues")
    omniq = page.locator(f'tr[data-queue="{stand.names["omniq"]}"]')
    expect(omniq).to_contain_text("tenant-7 2")
    bullmq = page.locator(f'tr[data-queue="{stand.names["bullmq"]}"]')
    expect(bullmq).to_contain_text("p5: 1")


def test_a_worker_of_an_sql_queue_is_seen_before_it_has_a_job(stand: Stand, page: Page) -> None:
    stand.open("inbox", "plane")
    stand.work()
    page.goto(f"{stand.url}/workers")
    for name in stand.names.values():
        expect(page.locator("tbody tr", has_text=name)).to_have_count(1)
