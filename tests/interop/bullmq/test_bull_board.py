"""bull-board, as an operator sees it in a browser: our worker, our failures, its buttons."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import AsyncGenerator, Generator

import pytest
import redis
from playwright.async_api import Error, Page

from tenure.contracts.bullmq import open_producer
from tenure.store.embedded import locate_node
from tests.interop.browser import opened_page
from tests.interop.bullmq.ours import worker
from tests.interop.bullmq.peer import HERE
from tests.waiting import until

pytestmark = pytest.mark.clause("B-48")
MENU_WAIT_MS = 500
MENU_TRIES = 20


@pytest.fixture
def board(port: int, name: str) -> Generator[str]:
    process = subprocess.Popen(
        [str(locate_node()), "board.cjs", str(port), name],
        cwd=HERE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}/queue/{name}"
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
async def page() -> AsyncGenerator[Page]:
    async with opened_page() as page:
        yield page


async def press(page: Page, text: str) -> None:
    """A button of the page, and the one that confirms it."""
    await page.get_by_role("button", name=text).first.click()
    await confirm(page)


async def confirm(page: Page) -> None:
    button = page.get_by_role("button", name=re.compile("^(Confirm|Yes)", re.IGNORECASE))
    with contextlib.suppress(Error):  # not everything is asked again
        await button.first.click(timeout=1_500)


async def choose(page: Page, text: str) -> None:
    """An entry of the menu of the queue, which is behind a button that has only an icon."""
    entry = page.get_by_role("menuitem", name=re.compile(text, re.IGNORECASE))
    menus = page.locator("button[aria-haspopup=menu]")
    await menus.first.wait_for()
    for _ in range(MENU_TRIES):  # the entries follow the state of the queue, which comes later
        for button in await menus.all():
            await button.click()
            try:
                await entry.first.click(timeout=MENU_WAIT_MS)
            except Error:
                await page.keyboard.press("Escape")
            else:
                return await confirm(page)
    pytest.fail(f"no menu has an entry {text!r}")


async def test_bull_board_shows_our_worker_and_the_traceback_of_its_failure(
    board: str, page: Page, name: str, url: str, raw: redis.Redis
) -> None:
    producer = open_producer(url)
    await producer.add("work", {"do": "fail", "why": "no ink left"})
    async with worker(url, name="painter"):
        await until(lambda: raw.zcard(f"bull:{name}:failed") == 1, "it failed")
        await page.goto(f"{board}?status=failed")
        await page.get_by_text("RuntimeError: no ink left").first.wait_for()
        await page.get_by_text("by painter").first.wait_for()
        assert await page.get_by_text("No workers").count() == 0
    await page.reload()
    await page.get_by_text("No workers").first.wait_for()
    await producer.close()


async def test_the_buttons_of_bull_board_act_on_our_queue(
    board: str, page: Page, name: str, url: str, raw: redis.Redis
) -> None:
    producer = open_producer(url)
    done, failed = f"bull:{name}:completed", f"bull:{name}:failed"
    await producer.add("work", {"do": "flaky", "times": 1})
    await producer.add("late", {}, delay=600_000)
    async with worker(url, name="painter"):
        await until(lambda: raw.zcard(failed) == 1, "it failed")
        await page.goto(f"{board}?status=failed")
        await press(page, "Retry all")
        await until(lambda: raw.zcard(done) == 1, "Retry all ran it again")
        await page.goto(f"{board}?status=delayed")
        await press(page, "Promote all")
        await until(lambda: raw.zcard(done) == 2, "Promote all ran it now")
        for job_id in raw.zrange(done, 0, -1):  # it cleans what finished a while ago
            raw.zincrby(done, -60_000, job_id)
        await page.goto(f"{board}?status=completed")
        await press(page, "Clean all")
        await until(lambda: raw.zcard(done) == 0, "Clean all removed them")
        await choose(page, "^Pause")
        await until(lambda: raw.hget(f"bull:{name}:meta", "paused"), "the queue is paused")
        await producer.add("work", {})
        assert raw.llen(f"bull:{name}:wait") == 1
        await page.goto(f"{board}?status=waiting")
        await choose(page, "^Resume")
        await until(lambda: raw.zcard(done) == 1, "what waited is done")
    await producer.close()
