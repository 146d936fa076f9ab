"""The whole way on both engines: a clip in a bucket, a job, ffmpeg, and verified webhooks.

The storage stops taking the first keys in the middle, the receiver answers 500 and hangs now and
then, and the operator rotates the vault's keys all the while.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from tenure import NewJob, Worker, open_ledger, task
from tenure.core.registry import open_part
from tenure.core.retry import fixed
from tenure.egress import Client, Guard, Limits, Policy
from tenure.transcode import Transcoder, TranscodeSettings, transcode_handler
from tenure.vault import Binding, Secret, Vault, new_kek, read_ring, rotate
from tenure.webhooks import deliver as deliver_module
from tenure.webhooks import new_secret, read_secret
from tenure.webhooks.deliver import CircuitBreaker, RetryPolicies, delivery_handler
from tenure.webhooks.refresh import Refresher
from tests.contract.egress.scripted import scripted
from tests.contract.inbox.conftest import RawSql
from tests.contract.inbox_stage import InboxStage
from tests.contract.transcode.bucket import S3Server
from tests.contract.transcode.conftest import FRESH, KEY, both, clip, s3
from tests.contract.webhooks.receiver import receiver

__all__ = ["clip", "s3"]

SECRET, JOBS = new_secret(), 4
OLD, NEW = new_kek("old-media"), new_kek("new-media")
TABLES = ("inbox_jobs", "job_outbox_events", "job_journal", "job_attempts")
STAGES = ["fetching", "processing", "uploading", "succeeded"]


class OneSecret:
    async def live(self, requester_id: str) -> Sequence[Secret]:
        assert requester_id == "acme"
        return [Secret(read_secret(SECRET))]


def moody(event, seen: int) -> int | None:
    """The first delivery of each third event fails, that of each fifth is done and not answered."""
    number = event.event["seq"]
    if seen == 1 and number % 3 == 0:
        return 500
    return None if seen == 1 and number % 5 == 0 else 204


@pytest.mark.options(lease_ms=10_000)
async def test_a_clip_goes_all_the_way_and_every_event_is_told_once(
    inbox: InboxStage,
    s3: S3Server,
    sql: RawSql,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deliver_module, "LIMITS", Limits(total_ms=400))
    forth, back = Vault(read_ring(f"{NEW}\n{OLD}")), Vault(read_ring(f"{OLD}\n{NEW}"))
    store = open_part(inbox.url, "credentials")
    guard = Guard(Policy(allow=("127.0.0.1/32",)))
    client = Client(guard)
    body = json.dumps({"credentials": both(FRESH)}).encode()
    granted = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with receiver([SECRET], moody) as there, scripted(lambda h, b: granted) as requester:
        names = [f"film-{uuid.uuid4()}" for _ in range(JOBS)]
        queue = inbox.queue("gateway")
        for name in names:
            plain = Secret(json.dumps(both(KEY)))
            sealed = await back.seal(plain, Binding(name, "acme", 1))
            options = {
                "credential_version": 1,
                "storage_creds_encrypted": sealed.encrypted,
                "storage_creds_dek_wrapped": sealed.dek_wrapped,
                "storage_creds_kek_id": sealed.kek_id,
                "storage_creds_encryption_version": sealed.encryption_version,
                "status_webhook_url": there.url,
                "refresh_url": f"http://127.0.0.1:{requester.port}/refresh",
            }
            await queue.submit(
                [
                    NewJob(
                        task="transcode",
                        payload=json.dumps(asked(s3)).encode(),
                        job_id=name,
                        requester="acme",
                        options=options,
                    )
                ]
            )
        shared = await Transcoder(
            store=store,
            vault=forth,
            refresh=Refresher(client, OneSecret(), store, forth).refresh,
            guard=guard,
            client=client,
            settings=TranscodeSettings(
                work_folder=tmp_path / "work", disk_reserve_bytes=0, threads=1
            ),
        ).start()
        handler = transcode_handler(shared)
        finished = 0

        async def transcode(job):
            nonlocal finished
            result = await handler(job)
            finished += 1
            if finished == 1:  # from here on the storage takes the new keys alone
                await asyncio.to_thread(s3.stop)
                await asyncio.to_thread(s3.start, FRESH)
            return result

        soon = RetryPolicies(
            default=fixed(30, max_attempts=10), rate_limited=fixed(60, max_attempts=10)
        )
        deliver = delivery_handler(
            client, OneSecret(), retries=soon, breaker=CircuitBreaker(failures_min=1_000)
        )
        outbox = f"{inbox.url}&box=outbox"
        worker = Worker(
            [task("transcode")(transcode), task("webhook")(deliver)],
            queues=[inbox.url, outbox],
            concurrency=5,
        )
        serving = asyncio.create_task(worker.serve())
        ledger = open_ledger(outbox)
        deadline = time.monotonic() + 90
        while not await told_everything(inbox, ledger, names):
            assert time.monotonic() < deadline, "it is not done in time"
            for vault in (forth, back):
                await rotate(store, vault)
                await asyncio.sleep(0.05)  # lets the others work between two rotations
        worker.stop()
        await serving
        await ledger.close()
    records = [await inbox.ledger.get(name) for name in names]
    keys = [json.loads(one.result)["outputs"][0]["key"] for one in records if one is not None]
    assert sorted(s3.objects("out")) == sorted(keys)
    assert there.refused.total() == 0
    assert set(there.effects.values()) == {1}
    for name in names:
        seqs = [one.event["seq"] for one in there.deliveries if one.event["job_id"] == name]
        states = [one.event["status"] for one in there.deliveries if one.event["job_id"] == name]
        assert seqs == sorted(seqs)
        assert sorted(set(seqs)) == list(range(1, max(seqs) + 1))
        assert [state for state, _ in itertools.groupby(states)][-4:] == STAGES
    assert requester.heads, "somebody met the new keys"
    stored = [repr(await sql(f"select * from {table}")) for table in TABLES]
    assert names[0] in stored[0]
    assert "canary" not in "".join(stored), "credentials are at rest as ciphertext alone"
    assert list((tmp_path / "work").rglob("attempt-*")) == []
    shared.close()
    await client.close()
    await store.close()


def asked(s3: S3Server) -> dict[str, object]:
    return {
        "source": {"url": "s3://in/clip.mp4", "endpoint": s3.endpoint},
        "destination": {"url": "s3://out/films", "endpoint": s3.endpoint},
        "outputs": [{"name": "small.mp4", "format": "mp4", "height": 120}],
    }


async def told_everything(inbox: InboxStage, ledger, names: Sequence[str]) -> bool:
    for name in names:
        record = await inbox.ledger.get(name)
        assert record is not None
        assert record.state != "dead_letter", record.error
        if record.state != "succeeded":
            return False
        last = await ledger.get(f"{name}.{record.extra['event_count']}")
        if last is None or last.state != "succeeded":
            return False
    return True
