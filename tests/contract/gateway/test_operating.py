"""What operators see and do: queues, health, metrics, pages, start and end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tenure.core.errors import UsageError
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.worker.events import Notifier
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import Web
from tests.waiting import until

PROGRAM = """
import sys, msgspec
from tenure.cli.config import notify_address
from tenure.gateway.server import run
from tenure.gateway.settings import GatewaySettings
address, watchdog_ms = notify_address()
settings = msgspec.json.decode(sys.argv[1], type=GatewaySettings)
run(settings, notify_socket=address, watchdog_ms=watchdog_ms)
"""


async def test_queues_are_listed_with_their_depths(site: Site, web: Web) -> None:
    for _ in range(3):
        await web.submit()
    await site.finish(await site.claim())
    await site.claim()
    [queue] = (await web.get("/api/queues")).json["queues"]
    assert queue["name"] == "streams"
    assert queue["states"]["waiting"] == queue["own_states"]["queued"] == 1
    assert queue["states"]["running"] == 1
    assert queue["states"]["done"] == 1
    assert queue["totals"]["submitted"] == 3
    assert queue["oldest_waiting_ms"] >= 0


async def test_a_paused_queue_hands_out_nothing_until_it_is_resumed(site: Site, web: Web) -> None:
    reply = await web.post("/api/queues/streams/pause")
    assert (reply.status, reply.json["paused"]) == (200, True)
    await web.submit()
    assert await site.worker.claim(1, wait_ms=1) == []
    assert (await web.post("/api/queues/streams/resume")).json["paused"] is False
    assert await site.claim()
    problem = is_problem(await web.post("/api/queues/strams/pause"), 404, "not_found")
    assert "streams" in problem["detail"]


async def test_metrics_count_requests_clients_and_jobs(web: Web) -> None:
    job_id = await web.submit()
    await web.get("/nope/unbounded-label")
    following = await web.follow(job_id)

    async def followed() -> bool:
        return "tenure_sse_clients 1.0" in (await web.get("/metrics")).body.decode()

    await until(followed)
    reply = await web.get("/metrics")
    families = {each.name: each for each in text_string_to_metric_families(reply.body.decode())}
    requests = {
        tuple(sample.labels.values()): sample.value
        for sample in families["tenure_http_requests"].samples
        if sample.name.endswith("_total")
    }
    assert requests["POST", "/v1/jobs", "202"] == 1
    assert requests["GET", "other", "404"] == 1
    samples = families["tenure_queue_depth"].samples
    depths = {(s.labels["state"], s.labels["own_state"]): s.value for s in samples}
    assert depths["waiting", "queued"] == 1
    assert families["tenure_oldest_waiting_seconds"].samples[0].value >= 0
    assert families["tenure_store_up"].samples[0].value == 1
    assert "tenure_http_request_duration_seconds" in families
    assert job_id not in reply.body.decode()
    assert "unbounded-label" not in reply.body.decode()
    following.close()
    negotiated = await web.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert negotiated.body.endswith(b"# EOF\n")


async def test_health_is_answered_in_json_and_in_plain_lines(web: Web) -> None:
    assert (await web.get("/livez")).body == b"ok\n"
    ready = await web.get("/readyz")
    assert ready.json == {"status": "ready", "checks": {"draining": "ok", "store:streams": "ok"}}
    assert (await web.get("/readyz?verbose")).body.endswith(b"[+] store:streams ok\nready\n")


@pytest.mark.parametrize("kind", ["streams", "sqlite"])
async def test_readiness_counts_no_jobs_and_many_askers_share_one_check(
    site: Site, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers may ask: what grows with the number of jobs, or of askers, would stop the store."""
    url = site.url() if kind == "streams" else f"plane+sqlite:///{tmp_path}/jobs.db"
    gateway = await site.gateway(queues=(url,))
    (queue,) = gateway.gateway.queues
    called: list[str] = []

    def spy(name: str) -> None:
        real = getattr(queue.ledger, name)

        async def seen(*given: object) -> object:
            called.append(name)
            return await real(*given)

        monkeypatch.setattr(queue.ledger, name, seen)

    for name in ("counts", "get", "probe"):
        spy(name)
    web = Web(gateway.url)
    replies = await asyncio.gather(*(web.get("/readyz") for _ in range(30)))
    assert {reply.status for reply in replies} == {200}
    assert called == ["get", "probe"]
    await asyncio.sleep(1.1)  # longer than an answer is believed
    assert (await web.get("/readyz")).status == 200
    assert called == ["get", "probe", "get"], "the write is tried every five seconds"


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script" and not dict(attrs).get("src"):
            self.inline.append(tag)
        for name, value in attrs:
            if name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")
            if name in ("href", "src"):
                self.links.append(value or "")
            if name == "id":
                self.ids.add(value or "")


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/jobs", "/queues", "/workers", "/dead", "/history", "/audit"]
)
async def test_the_pages_have_no_inline_code_and_their_links_lead_somewhere(
    web: Web, path: str
) -> None:
    page = _Links()
    answer = await web.get(path)
    page.feed(answer.body.decode())
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert not page.inline
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        else:
            assert (await web.get(link)).status == 200, link


async def test_the_docs_explain_every_problem_and_operation(web: Web) -> None:
    page = _Links()
    text = (await web.get("/docs")).body.decode()
    page.feed(text)
    document = (await web.get("/openapi.json")).json
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["operationId"] in page.ids
    problem = is_problem(await web.get("/nope"), 404, "not_found")
    assert problem["type"].removeprefix("/docs#") in page.ids


async def test_the_examples_on_the_first_page_work_as_written(web: Web) -> None:
    text = (await web.get("/")).body.decode()
    base = re.search(r"curl -s (\S+)/v1/jobs -H", text)
    assert base is not None
    assert base.group(1) == web.url


async def test_a_unix_socket_serves_local_callers(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    web = await site.web(unix_socket=str(path))
    assert web.url == f"unix:{path}"
    await web.submit()
    settings = GatewaySettings(queues=(site.url(),), unix_socket=str(path))
    with pytest.raises(UsageError, match="cannot listen"):
        async with serving(settings):
            raise AssertionError("somebody else serves there")


async def test_a_socket_file_that_nobody_serves_is_replaced(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    web = await site.web(unix_socket=str(path))
    await web.submit()


async def test_a_taken_port_is_said_in_plain_words(site: Site) -> None:
    gateway = await site.gateway()
    port = int(gateway.url.rpartition(":")[2])
    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
        await site.gateway(port=port)


async def test_draining_turns_readiness_off_and_sends_followers_away(site: Site) -> None:
    gateway = await site.gateway()
    web = Web(gateway.url)
    job_id = await web.submit()
    following = await web.follow(job_id)
    gateway.gateway.drain()
    async with asyncio.timeout(5):
        seen = [event async for event in following]
    assert seen[-1].name == ":"
    assert 0 < (seen[-1].retry or 0) <= 2000
    assert (await web.get("/readyz")).status == 503
    is_problem(await web.get(f"/v1/jobs/{job_id}/events"), 503, "draining")
    browser = await web.get(f"/v1/jobs/{job_id}/events", accept="text/event-stream")
    assert browser.status == 200, "EventSource would never come again after anything else"
    assert browser.body.startswith(b"retry: ")
    assert (await web.get(f"/v1/jobs/{job_id}")).status == 200, "what still comes is answered"


async def start_program(site: Site, **settings: object) -> asyncio.subprocess.Process:
    import msgspec

    environment = dict(os.environ) | {
        name: str(settings.pop(name)) for name in list(settings) if name.isupper()
    }
    made = GatewaySettings(queues=(site.url(),), **settings)  # type: ignore[arg-type]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, msgspec.json.encode(made).decode(), env=environment
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_process_and_systemd_hears_of_it(
    site: Site, tmp_path: Path, number: signal.Signals
) -> None:
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notices.bind(str(tmp_path / "notify"))
    notices.setblocking(False)
    path = str(tmp_path / "g.sock")
    loop = asyncio.get_running_loop()
    program = await start_program(
        site, unix_socket=path, NOTIFY_SOCKET=tmp_path / "notify", WATCHDOG_USEC=200_000
    )
    try:
        async with asyncio.timeout(20):
            assert (await loop.sock_recv(notices, 999)).startswith(b"READY=1\n")
            assert await loop.sock_recv(notices, 999) == b"WATCHDOG=1"
            assert await loop.sock_recv(notices, 999) == b"WATCHDOG=1"
            web = Web(f"unix:{path}")
            following = await web.follow(await web.submit())
            program.send_signal(number)
            seen = [event async for event in following]
            assert "restarting" in seen[-1].data
            while (said := await loop.sock_recv(notices, 999)) == b"WATCHDOG=1":
                pass
            assert said.startswith(b"STOPPING=1")
            assert await program.wait() == 0
        assert not Path(path).exists()
    finally:
        notices.close()
        if program.returncode is None:
            program.kill()
            await program.wait()


def test_a_notifier_without_systemd_is_silent() -> None:
    Notifier("").send("READY=1")
    Notifier("@nobody-listens-here").send("READY=1")


async def test_probes_and_metrics_are_not_in_the_rate_of_the_callers(site: Site) -> None:
    web = await site.web(rate_per_s=0.01, rate_burst=1)
    for path in ("/livez", "/readyz", "/metrics"):
        assert [(await web.get(path)).status for _ in range(3)] == [200] * 3, path
    assert [(await web.get("/api/queues")).status for _ in range(2)] == [200, 429]
    assert (await web.get("/readyz")).status == 200
