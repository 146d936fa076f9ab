"""The gateway in an application of the user's own, under a prefix, as a browser sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from tenure.core.job import NewJob
from tenure.gateway import GatewaySettings, create_app, router
from tests.browser.stand import Stand
from tests.contract.adapters import served_url

PREFIX = "/tools/queue"
FOLLOW = """([url]) => new Promise((resolve, reject) => {
  const source = new EventSource(url), names = [];
  for (const name of ["hello", "queued", "started", "progress", "done"])
    source.addEventListener(name, () => {
      names.push(name);
      if (name === "done") { source.close(); resolve(names); }
    });
  source.onerror = () => reject(new Error(`the stream broke after ${names}`));
})"""


def mounted(settings: GatewaySettings) -> FastAPI:
    app = FastAPI()
    app.mount(PREFIX, create_app(settings))
    return app


def included(settings: GatewaySettings) -> FastAPI:
    app = FastAPI()
    app.include_router(router(settings), prefix=PREFIX)
    return app


@pytest.mark.parametrize("way", [mounted, included])
def test_pages_event_streams_and_document_work_under_a_prefix(
    stand: Stand, visit: Callable[..., Page], way: Callable[..., FastAPI]
) -> None:
    stand.open("streams")
    settings = GatewaySettings(queues=(served_url(stand.stages["streams"]),))
    url = stand.serve(way(settings))
    page = visit(f"{url}{PREFIX}/")
    looks_right(stand, page, f"{url}{PREFIX}")
    document = page.request.get(f"{url}{PREFIX}/openapi.json").json()
    assert document["servers"] == [{"url": PREFIX}]
    assert "/v1/jobs/{job_id}/events" in document["paths"]
    assert document["components"]["schemas"]["CreateJob"]["required"] == ["task", "payload"]
    whole = page.request.get(f"{url}/openapi.json").json()
    assert (f"{PREFIX}/v1/jobs" in whole["paths"]) == (way is included)


def looks_right(stand: Stand, page: Page, url: str) -> None:
    expect(page.locator("#pulse")).to_have_text("live")
    expect(page.locator("header.top")).to_have_css("display", "flex")  # the style sheet arrived
    page.get_by_role("navigation").get_by_role("link", name="Jobs").click()
    expect(page).to_have_url(f"{url}/jobs")
    (job_id,) = stand.submit("streams", NewJob(task="greet", payload=b'{"name":"Ada"}'))
    page.get_by_role("link", name=job_id).click()
    expect(page).to_have_url(f"{url}/jobs/{stand.names['streams']}/{job_id}")
    stand.work()
    names = page.evaluate(FOLLOW, [f"{url}/v1/jobs/{job_id}/events"])
    assert (names[0], names[-1]) == ("hello", "done")
    expect(page.locator("#live")).to_contain_text("done")
