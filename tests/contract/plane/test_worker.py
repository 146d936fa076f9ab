"""The real worker runtime over HTTP: restarts of the plane, lost leases, TLS with a private CA."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trustme

from tenure import Job, NewJob, Worker, task
from tenure.contracts.plane import MACHINE as PLANE
from tenure.core.errors import StoreUnreachable, UsageError
from tenure.core.outcome import Outcome
from tenure.core.registry import open_queue
from tenure.gateway.keys import MemoryKeyRing
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.http_proxy import HttpProxy
from tests.contract.plane.conftest import Site, claim, enqueue
from tests.ports import free_port
from tests.waiting import until


@task("double")
async def double(job: Job) -> int:
    return 2 * int(job.payload)


def jobs(count: int, name: str = "double") -> list[NewJob]:
    return [NewJob(task=name, payload=b"%d" % n, job_id=f"{name}-{n}") for n in range(count)]


@pytest.mark.clause("P-23")
async def test_the_worker_runs_jobs_over_http(site: Site) -> None:
    running = await site.gateway()
    queue = site.worker(running.url)
    await queue.submit(jobs(100))
    await Worker([double], queues=[f"plane+{running.url}"], burst=True).serve()
    ledger = site.ledger()
    assert (await ledger.counts()).states["SUCCEEDED"] == 100
    stored = await ledger.get("double-21")
    assert stored is not None
    assert stored.result == b"42"


@pytest.mark.clause("P-23", "P-18")
async def test_the_worker_survives_restarts_of_the_plane(site: Site) -> None:
    port = free_port()
    settings = GatewaySettings(queues=(site.url(),), port=port, drain_ms=500)
    local, ledger = site.local(), site.ledger()
    worker = Worker([double], queues=[f"plane+http://127.0.0.1:{port}"], concurrency=4)
    serving_jobs = asyncio.create_task(worker.serve())
    try:
        for round_number in range(3):
            async with serving(settings, ring=MemoryKeyRing()):
                done = 30 * (round_number + 1)
                more = [
                    NewJob(task="double", payload=b"1", job_id=f"r{round_number}-{n}")
                    for n in range(30)
                ]
                await local.submit(more)

                async def all_done(least: int = done) -> bool:
                    return (await ledger.counts()).states["SUCCEEDED"] >= least

                await until(all_done, within_s=30)
    finally:
        serving_jobs.cancel()
        await asyncio.gather(serving_jobs, return_exceptions=True)
    counts = (await ledger.counts()).states
    assert sum(counts[state] for state in PLANE.final) == sum(counts.values()) == 90


@pytest.mark.clause("P-23", "P-16")
async def test_a_worker_cut_off_from_the_plane_stops_within_its_lease(site: Site) -> None:
    """The job runs elsewhere meanwhile, and nothing of the first attempt is accepted."""
    lease_ms = 1_500
    running = await site.gateway(site.url(lease_ms=lease_ms, upkeep_ms=100))
    proxy = await HttpProxy(running.url).start()
    site.stack.push_async_callback(proxy.stop)
    began, ended = asyncio.Event(), asyncio.Event()

    @task("long")
    async def long(job: Job) -> str:
        began.set()
        try:
            await asyncio.sleep(60)  # the handler: cancelled long before
        finally:
            ended.set()
        return "from the one who was cut off"

    local = site.local()
    await local.submit([NewJob(task="long", payload=b"1", job_id="long-1", max_attempts=5)])
    worker = Worker([long], queues=[f"plane+{proxy.url}"])
    cut_off = asyncio.create_task(worker.serve())
    try:
        await asyncio.wait_for(began.wait(), 10)
        proxy.cut(cut=True)
        cut_at = asyncio.get_running_loop().time()
        await asyncio.wait_for(ended.wait(), 20)
        stopped_after_s = asyncio.get_running_loop().time() - cut_at
        elsewhere = site.worker(running.url, "w2")
        (lease,) = await elsewhere.claim(1, wait_ms=10_000)
        assert (lease.job_id, lease.attempt) == ("long-1", 2)
        assert stopped_after_s < lease_ms / 1000 + 1.0, "a loaded machine may be a second late"
        proxy.cut(cut=False)
    finally:
        proxy.cut(cut=False)
        cut_off.cancel()
        await asyncio.gather(cut_off, return_exceptions=True)


@pytest.mark.clause("P-23")
async def test_a_private_authority_is_verified(site: Site, tmp_path: Path) -> None:
    running = await site.gateway()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    port = int(running.url.rpartition(":")[2])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection("127.0.0.1", port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, there), pump(back, writer), return_exceptions=True)

    async with AsyncExitStack() as stack:
        door = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        stack.callback(door.close)
        secure = f"plane+https://127.0.0.1:{door.sockets[0].getsockname()[1]}"
        queue = open_queue(f"{secure}?cafile={tmp_path}/ca.pem", worker_id="w1")
        await queue.submit(jobs(3))
        assert len(await queue.claim(3, wait_ms=1_000)) == 3
        await queue.close()
        stranger = open_queue(secure, worker_id="w1")
        with pytest.raises(StoreUnreachable):
            await stranger.claim(1, wait_ms=0)
        await stranger.close()


@pytest.mark.clause("P-20", "P-23")
async def test_a_worker_shows_its_key_and_is_refused_without_a_stream_of_its_own(
    site: Site, tmp_path: Path
) -> None:
    _, key = await site.ring.create(["jobs:work", "stream:mail"], "mailer")
    _, producer = await site.ring.create(["jobs:write"], "producer")
    running = await site.gateway(site.url(streams="mail,video"))
    host = running.url.removeprefix("http://")
    sender = open_queue(f"plane+http://x:{producer}@{host}")
    await sender.submit([NewJob(task="t", payload=b"1", options={"stream": "mail"})])
    await sender.close()
    (tmp_path / "key").write_text(key + "\n")
    queue = site.worker(running.url, "w1", f"?streams=mail&key_file={tmp_path}/key")
    (lease,) = await queue.claim(1, wait_ms=1_000)
    assert lease.queue == "mail"
    for query in ("?streams=a%20b", "?cafile=/nowhere", "?answer_ms=1", "?stream=mail"):
        with pytest.raises(UsageError):
            open_queue(f"plane+{running.url}{query}")


@pytest.mark.clause("P-7", "P-18")
async def test_library_and_http_meet_in_the_same_database(site: Site) -> None:
    web = await site.web()
    local = site.local()
    by_http = await enqueue(web)
    (lease,) = await local.claim(1, wait_ms=1_000)
    assert lease.job_id == by_http
    (stored,) = await local.submit([NewJob(task="t", payload=b"2")])
    assert (await claim(web))["job_id"] == stored.job_id


@pytest.mark.clause("P-23")
async def test_a_batch_is_cut_to_what_the_plane_takes_and_a_larger_result_is_buried(
    site: Site,
) -> None:
    queue = site.worker((await site.gateway()).url)
    text = b'"' + b"x" * 300_000 + b'"'
    told = await queue.submit(
        [NewJob(task="t", payload=text, job_id=f"large-{n}") for n in range(7)]
    )
    assert [each.status for each in told] == ["created"] * 7
    leases = await queue.claim(7, wait_ms=10_000)
    results = [text] * 6 + [b'"' + b"x" * (1 << 20) + b'"']
    ends = [Outcome(lease, "complete", r) for lease, r in zip(leases, results, strict=True)]
    await queue.settle(ends)
    states = (await site.ledger().counts()).states
    assert (states["SUCCEEDED"], states["DLQ"]) == (6, 1)
    buried = await site.ledger().get(leases[-1].job_id)
    assert buried is not None
    assert b"result_too_large" in buried.error
