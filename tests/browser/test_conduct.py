"""How the pages behave: signing in, keyboards, colours, breaks, haste, and those who cannot see."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tenure.core.job import NewJob
from tenure.gateway.keyrings import open_keyring
from tests.browser.conftest import Watched
from tests.browser.stand import Stand
from tests.interop.npm import installed
from tests.ports import free_port

AXE = Path(__file__).parent / "axe"
PAGES = ("/", "/jobs", "/jobs?q=is:failed", "/queues", "/workers", "/dead", "/outbox", "/history")
PAGES += ("/audit",)

HOOK = {"status_webhook_url": "https://hooks.example/jobs"}


def filled(stand: Stand) -> str:
    """A stand with something on every page; the path of a failed job."""
    stand.open("streams", "bullmq", "inbox")
    stand.work()
    stand.submit("inbox", NewJob(task="greet", payload=b"{}", options=HOOK))
    name = stand.names["bullmq"]
    ok, bad, _ = stand.submit(
        "bullmq",
        NewJob(task="greet", payload=b'{"name":"Ada"}'),
        NewJob(task="boom", payload=b"{}", max_attempts=2),
        NewJob(task="slow", payload=b"{}"),
    )
    stand.wait_for("bullmq", ok, ("done",))
    stand.wait_for("bullmq", bad, ("failed",))
    return f"/jobs/{name}/{bad}"


def key_of(stand: Stand, contract: str, *scopes: str) -> str:
    async def create() -> str:
        ring = open_keyring(stand.stages[contract].url)
        try:
            return (await ring.create(scopes, "test"))[1]
        finally:
            await ring.close()

    return stand.run(create())


def sign_in(page: Page, url: str, key: str) -> None:
    page.goto(url)
    expect(page).to_have_url(re.compile("/login"))
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def test_with_keys_a_page_asks_to_sign_in_and_a_wrong_key_is_told(
    stand: Stand, page: Page, watched: Watched
) -> None:
    watched.allowed.append("401")
    stand.open("streams")
    key = key_of(stand, "streams", "admin")
    time.sleep(1.1)  # what the door knew of keys is believed for a second
    sign_in(page, f"{stand.url}/queues", "tn_wrong")
    expect(page.get_by_role("alert")).to_contain_text("unknown")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(f"{stand.url}/queues")
    cookie = page.context.cookies()[0]
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert key.split("_")[2] not in cookie["value"]
    page.get_by_role("button", name="sign out").click()
    expect(page).to_have_url(re.compile("/login"))
    page.goto(f"{stand.url}/queues")
    expect(page).to_have_url(re.compile("/login"))


def test_a_key_that_may_only_observe_sees_everything_and_no_button(
    stand: Stand, page: Page
) -> None:
    stand.open("streams", "inbox")
    stand.submit("streams", NewJob(task="greet", payload=b"{}"))
    key = key_of(stand, "streams", "observe")
    time.sleep(1.1)  # see above
    sign_in(page, f"{stand.url}/jobs", key)
    expect(page.locator("tr[data-href]")).to_have_count(1)
    for path in PAGES:
        page.goto(stand.url + path)
        expect(page.locator("main form[method=post]:has(button)")).to_have_count(0)
    answer = page.request.post(
        f"{stand.url}/ui/queue",
        form={"verb": "pause", "queue": "streams"},
        headers={"origin": stand.url},
    )
    assert answer.status == 403
    assert not stand.ask("streams", lambda ledger: ledger.counts()).paused


def test_a_form_of_another_site_does_nothing(stand: Stand, page: Page, watched: Watched) -> None:
    watched.allowed.append("403")
    stand.open("streams")
    other = stand.url.replace("127.0.0.1", "localhost")
    form = f'<form method="post" action="{stand.url}/ui/queue"><input name="verb" value="pause">'
    form += '<input name="queue" value="streams"><button>go</button></form>'
    page.route(f"{other}/evil", lambda route: route.fulfill(body=form, content_type="text/html"))
    page.goto(f"{other}/evil")
    watched.strangers.clear()  # the page of the other site was our own doing
    with page.expect_navigation() as navigation:
        page.get_by_role("button").click()
    assert navigation.value.status == 403
    assert not stand.ask("streams", lambda ledger: ledger.counts()).paused


def test_axe_finds_nothing_serious_in_light_and_dark(stand: Stand, page: Page) -> None:
    job = filled(stand)
    installed(AXE)
    script = (AXE / "node_modules" / "axe-core" / "axe.min.js").read_text()
    problems = []
    for path in (*PAGES[:3], job, *PAGES[3:], "/login", "/jobs/confirm?verb=retry&q=is:failed"):
        page.goto(stand.url + path)
        page.evaluate(f"() => {{ {script} }}")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            found = page.evaluate(
                "async () => (await axe.run({ resultTypes: ['violations'] })).violations"
            )
            problems += [
                f"{scheme} {path}: {each['id']} {each['nodes'][0]['html'][:120]}"
                for each in found
                if each["impact"] in ("serious", "critical")
            ]
    assert not problems, "\n".join(problems)


def test_dark_mode_follows_the_system_and_the_switch_is_remembered(
    stand: Stand, page: Page
) -> None:
    stand.open("streams")
    page.emulate_media(color_scheme="dark")
    page.goto(stand.url)

    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert ground() == "rgb(18, 20, 26)"
    page.get_by_role("button", name="theme").click()
    assert ground() == "rgb(251, 251, 253)"
    page.reload()
    assert ground() == "rgb(251, 251, 253)"


def test_the_list_is_used_with_the_keyboard_alone(stand: Stand, page: Page) -> None:
    stand.open("streams")
    stand.submit("streams", *[NewJob(task="greet", payload=b"{}") for _ in range(3)])
    page.goto(stand.url)
    page.keyboard.press("g")
    page.keyboard.press("j")
    expect(page).to_have_url(f"{stand.url}/jobs")
    page.keyboard.press("/")
    expect(page.locator("#q")).to_be_focused()
    page.keyboard.type("is:waiting")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{stand.url}/jobs?q=is%3Awaiting")
    expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
    for key in ("j", "j", "x"):
        page.keyboard.press(key)
    expect(page.locator("tr[data-href]").nth(1).locator("input")).to_be_checked()
    page.keyboard.press("k")
    href = page.locator("tr.at").get_attribute("data-href")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{stand.url}{href}")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()


def test_the_row_at_hand_and_the_ticks_outlive_what_is_fetched_again(
    stand: Stand, page: Page
) -> None:
    stand.open("streams")
    stand.submit("streams", *[NewJob(task="greet", payload=b"{}") for _ in range(3)])
    page.goto(f"{stand.url}/jobs")
    expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
    for key in ("j", "x", "j"):
        page.keyboard.press(key)
    ticked = page.locator("tr[data-href]").nth(0).get_attribute("data-href")
    at = page.locator("tr.at").get_attribute("data-href")
    assert at != ticked

    for rows in (4, 5, 6):  # each new job is at the top of the list, and moves the others down
        stand.submit("streams", NewJob(task="greet", payload=b"{}"))
        expect(page.locator("tr[data-href]")).to_have_count(rows)
    expect(page.locator(f"tr[data-href='{ticked}'] input")).to_be_checked()
    expect(page.locator("tr.at")).to_have_attribute("data-href", str(at))
    page.keyboard.press("x")
    expect(page.locator(f"tr[data-href='{at}'] input")).to_be_checked()
    expect(page.locator("input[name=job]:checked")).to_have_count(2)


def test_a_search_is_a_link_and_pages_go_on_without_gap_or_repeat(stand: Stand, page: Page) -> None:
    stand.open("streams", "bullmq")
    made = set(stand.submit("streams", *[NewJob(task="a", payload=b"{}") for _ in range(70)]))
    made |= set(stand.submit("bullmq", *[NewJob(task="a", payload=b"{}") for _ in range(70)]))
    stand.submit("bullmq", *[NewJob(task="b", payload=b"{}") for _ in range(5)])
    page.goto(f"{stand.url}/jobs?q=task:a")
    seen: list[str] = []
    while True:
        seen += page.locator("td a.id").all_inner_texts()
        if not page.locator("#more").count():
            break
        page.locator("#more").click()
    assert len(seen) == len(set(seen)) == 140
    assert set(seen) == made


def test_a_mistyped_search_is_explained(stand: Stand, page: Page, watched: Watched) -> None:
    watched.allowed.append("422")
    stand.open("streams")
    page.goto(f"{stand.url}/jobs?q=stat:failed")
    expect(page.get_by_role("alert")).to_contain_text("did you mean 'state'?")


@pytest.mark.timeout(90)
def test_a_page_reconnects_after_the_gateway_was_killed(
    stand: Stand, page: Page, watched: Watched, tmp_path: Path
) -> None:
    watched.allowed += ["ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY"]
    stand.open("streams")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    gateway = start_gateway(port, stand.stages["streams"].url, tmp_path)
    try:
        page.goto(f"{url}/jobs")
        expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
        gateway.send_signal(signal.SIGKILL)
        gateway.wait(10)
        expect(page.locator("#pulse")).to_have_attribute("data-state", "away")
        stand.submit("streams", NewJob(task="greet", payload=b"{}"))
        gateway = start_gateway(port, stand.stages["streams"].url, tmp_path)
        expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
        expect(page.locator("tr[data-href]")).to_have_count(1)
    finally:
        gateway.terminate()
        gateway.wait(20)


def start_gateway(port: int, queue_url: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tenure.cli", "gateway", "--port", str(port)]
    log = (folder / "gateway.log").open("ab")
    process = subprocess.Popen(
        [*command, "--queue", queue_url], stdout=log, stderr=log, env=dict(os.environ), cwd=folder
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        assert process.poll() is None, (folder / "gateway.log").read_text()
        time.sleep(0.05)  # a poll, bounded by the deadline
    raise AssertionError("the gateway did not start")


@pytest.mark.alone
@pytest.mark.timeout(90)
def test_a_hundred_events_a_second_leave_the_page_at_ease(
    stand: Stand, page: Page, context: BrowserContext, record_property: object
) -> None:
    """The share of the main thread that the jobs page takes while 100 jobs a second go by."""
    stand.open("streams")
    page.goto(f"{stand.url}/jobs")
    expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
    session = context.new_cdp_session(page)
    session.send("Performance.enable")

    def busy_s() -> tuple[float, float]:
        got = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        return float(got["TaskDuration"]), float(got["Timestamp"])

    page.evaluate(
        "() => { window.longest = 0; new PerformanceObserver((list) => { for (const e of "
        "list.getEntries()) window.longest = Math.max(window.longest, e.duration) })"
        ".observe({ entryTypes: ['longtask'] }) }"
    )
    task_s, at_s = busy_s()
    begun = time.monotonic()
    sent = 0
    while time.monotonic() - begun < 5:
        stand.submit("streams", *[NewJob(task="greet", payload=b"{}") for _ in range(10)])
        sent += 10
        time.sleep(max(0.0, begun + sent / 100 - time.monotonic()))
    task_2, at_2 = busy_s()
    share = (task_2 - task_s) / (at_2 - at_s)
    longest_ms = float(page.evaluate("window.longest"))
    refreshed = int(str(page.evaluate("document.body.dataset.refreshed || 0")))
    record_property("main_thread_share", share)  # type: ignore[operator]
    print(f"main thread {share:.1%}, longest task {longest_ms:.0f} ms, {refreshed} refreshes")
    assert sent >= 400
    assert refreshed >= 3
    assert share < 0.4, f"{share:.0%} of the main thread"
