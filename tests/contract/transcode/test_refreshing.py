"""Credentials that expire in the middle are refreshed, and no secret shows itself anywhere."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from datetime import timedelta

import obstore
import pytest
import structlog
from obstore.store import S3Store

from tenure import NewJob, Worker, open_ledger, open_queue, task
from tenure.core.lease import Lease
from tenure.core.outcome import Fatal
from tenure.core.retry import failure_of
from tenure.egress import Client, Guard
from tenure.vault import Secret, StoredCredentials, Vault, new_kek, read_ring, rotate
from tenure.webhooks import new_secret, read_secret
from tenure.webhooks.refresh import Refresher, RefreshSettings
from tenure.worker.telemetry import configure_logs
from tests.contract.egress.scripted import scripted
from tests.contract.transcode.bucket import S3Server
from tests.contract.transcode.conftest import FRESH, KEY, Job, Studio, ask, both, keys

SECRET = new_secret()


class OneSecret:
    async def live(self, requester_id: str) -> Sequence[Secret]:
        return [Secret(read_secret(SECRET))]


def refresher(studio: Studio, client: Client) -> Refresher:
    quick = RefreshSettings(attempts_max=3, wait_ms=200, poll_ms=20)
    return Refresher(client, OneSecret(), studio.store, studio.vault, settings=quick)


def granting(credentials: object) -> bytes:
    body = json.dumps({"credentials": credentials}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.clause("I-45", "I-57")
async def test_keys_that_expire_between_fetch_and_upload_are_refreshed(
    s3: S3Server, studio: Studio
) -> None:
    """While ffmpeg works, the storage stops taking the old keys; a real 403 asks for new ones."""
    async with scripted(lambda head, body: granting(both(FRESH))) as requester:
        url = f"http://127.0.0.1:{requester.port}/refresh"
        await studio.store.add(studio.vault, "job-1", "acme", both(KEY), url)
        client = Client(Guard(studio.policy))
        studio.refresh = refresher(studio, client).refresh

        def expire(stage: str, percent: object) -> None:
            if (stage, percent) == ("processing", 100):
                s3.stop()
                s3.start(FRESH)

        result = await (await studio.handler())(Job(ask(s3), hook=expire))
        await client.close()
    assert list(s3.objects("out")) == [result["outputs"][0]["key"]]
    assert len(requester.heads) == 1
    row = studio.store.row("job-1")
    assert (row[3], row[4]) == (2, 1), "the version rose by one, with one refresh"


@pytest.mark.clause("I-46")
async def test_keys_that_are_never_accepted_end_the_job_at_the_limit(
    s3: S3Server, studio: Studio
) -> None:
    async with scripted(lambda head, body: granting(both(("AKID", "wrong")))) as requester:
        url = f"http://127.0.0.1:{requester.port}/refresh"
        await studio.store.add(studio.vault, "job-1", "acme", both(("AKID", "stale")), url)
        client = Client(Guard(studio.policy))
        studio.refresh = refresher(studio, client).refresh
        with pytest.raises(Fatal, match="3 refreshes"):
            await (await studio.handler())(Job(ask(s3)))
        await client.close()
    assert len(requester.heads) == 3


@pytest.mark.clause("I-57")
@pytest.mark.parametrize("scheme", ["http", "HTTP"])
async def test_signed_urls_serve_instead_of_keys(s3: S3Server, studio: Studio, scheme: str) -> None:
    def signed(bucket: str, method: str, path: str) -> str:
        config = {"endpoint": s3.endpoint, "region": "us-east-1", **keys(KEY)}
        store = S3Store(bucket, config=config, client_options={"allow_http": True})
        url = obstore.sign(store, method, path, timedelta(minutes=5))
        return f"{scheme}:{url.partition(':')[2]}"

    given = {
        "source": {"signed_url": signed("in", "GET", "clip.mp4")},
        "destination": {"signed_urls": {"a.jpg": signed("out", "PUT", "picture.jpg")}},
    }
    await studio.store.add(studio.vault, "job-1", "acme", given)
    payload = {"source": {}, "outputs": [{"name": "a.jpg", "format": "jpg"}]}
    result = await (await studio.handler())(Job(payload))
    assert s3.objects("out") == {"picture.jpg": result["outputs"][0]["bytes"]}


@pytest.mark.clause("I-45")
async def test_a_signed_url_that_has_expired_asks_for_a_new_one(
    s3: S3Server, studio: Studio
) -> None:
    config = {"endpoint": s3.endpoint, "region": "us-east-1", **keys(KEY)}
    store = S3Store("in", config=config, client_options={"allow_http": True})
    good = obstore.sign(store, "GET", "clip.mp4", timedelta(minutes=5))
    asked: list[int] = []
    await studio.store.add(studio.vault, "job-1", "acme", {"source": {"signed_url": good + "0"}})

    async def refresh(lease: Lease, version: int) -> StoredCredentials:
        asked.append(version)
        fresh = {"source": {"signed_url": good}, "destination": keys(KEY)}
        await studio.store.update(studio.vault, "job-1", fresh)
        return await studio.store.read(lease)

    studio.refresh = refresh
    payload = ask(s3, {"name": "a.jpg", "format": "jpg"})
    assert (await (await studio.handler())(Job(payload)))["outputs"]
    assert asked == [1]


@pytest.mark.clause("I-52")
async def test_no_secret_reaches_logs_errors_or_results(
    s3: S3Server, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong keys, expired signed URLs and refused endpoints, each with a canary inside."""
    out = io.StringIO()
    before = structlog.get_config()
    configure_logs(level="debug", json=True, stream=out)
    wrong = ("AKIDX", "canary-wrong-secret")
    cases = [
        (both(wrong), ask(s3)),
        ({"source": {"signed_url": f"{s3.endpoint}/in/clip.mp4?sig=canary-query"}}, ask(s3)),
        ({"source": {"signed_url": "https://canary-user:canary-pw@h.example/x"}}, ask(s3)),
        ({"source": {"signed_url": "http://10.0.0.1/canary-path"}}, ask(s3)),
        ({"source": keys(KEY), "destination": keys(wrong)}, ask(s3)),
        ({"source": "canary-not-an-object"}, ask(s3)),
        (both(KEY) | {"source": keys(KEY) | {"session_token": "canary\nbroken"}}, ask(s3)),
        (both(KEY), ask(s3, source="s3://canary-user:canary-pw@in/clip.mp4?canary=1")),
    ]
    said = []
    handler = await studio.handler()
    for number, (given, payload) in enumerate(cases):
        job_id = f"job-{number}"
        await studio.store.add(studio.vault, job_id, "acme", given)
        try:
            said.append(repr(await handler(Job(payload, id=job_id))))
        except Exception as error:
            kept = failure_of(error)
            said.append(kept.code + kept.message + kept.stack)
    structlog.configure(**before)
    assert len(said) == len(cases)
    assert "canary" not in out.getvalue()
    found = [text for text in said if "canary" in text.replace("test_no_secret", "")]
    assert not found


@pytest.mark.clause("I-51")
async def test_a_worker_transcodes_while_the_operator_rotates_keys(
    s3: S3Server, studio: Studio
) -> None:
    """The real worker on a queue, and rotations to and fro all the while."""
    old, new = new_kek("old"), new_kek("new")
    forth, back = Vault(read_ring(f"{new}\n{old}")), Vault(read_ring(f"{old}\n{new}"))
    studio.vault = forth
    url = "memory://transcode-rotation"
    queue = open_queue(url)
    payload = json.dumps(ask(s3, {"name": "a.jpg", "format": "jpg"})).encode()
    names = [f"job-{number}" for number in range(6)]
    for name in names:
        await studio.store.add(Vault(read_ring(old)), name, "acme", both(KEY))
        await queue.submit([NewJob(task="transcode", payload=payload, job_id=name)])
    blobs = {name: studio.store.row(name)[6] for name in names}
    handler = await studio.handler()
    worker = Worker([task("transcode")(handler)], queues=[url], burst=True, concurrency=2)
    serving = asyncio.create_task(worker.serve())
    moved = 0
    while not serving.done():
        for vault in (forth, back):
            moved += (await rotate(studio.store, vault)).rewrapped
            await asyncio.sleep(0.01)  # lets the worker run between two rotations
    await serving
    ledger = open_ledger(url)
    records = [await ledger.get(name) for name in names]
    assert all(record is not None and record.result for record in records)
    assert {studio.store.row(name)[6] for name in names} == set(blobs.values())
    assert moved >= 12
    assert len(s3.objects("out")) == 6
    await queue.close()
