"""Workers that know the contract's text and nothing else: claim, heartbeat, complete, fail, ack."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tenure.contracts.plane.transports import GROUP
from tenure.store.embedded.programs import locate_node
from tenure.store.redis import Redis
from tests.contract.gateway.web import Web
from tests.contract.plane.conftest import Site, enqueue
from tests.waiting import until

HERE = Path(__file__).parent
LEASE_MS = 1_500


class Foreign:
    """A worker of another make, and what the plane answered it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def answers(self, verb: str) -> list[dict[str, Any]]:
        return [answer for name, answer in self.heard if name == verb]

    async def read(self, stdout: asyncio.StreamReader) -> None:
        while line := (await stdout.readline()).decode():
            verb, _, answer = line.partition(" ")
            self.heard.append((verb, json.loads(answer)))


@asynccontextmanager
async def foreign(language: str, web: Web, options: dict[str, object]) -> AsyncIterator[Foreign]:
    program = [str(locate_node())] if language == "node" else ["bash"]
    program.append(str(HERE / f"contract_worker.{'mjs' if language == 'node' else 'sh'}"))
    redis = urlsplit(str(options["redis"]))
    process = await asyncio.create_subprocess_exec(
        *program,
        *(web.url, "jobs", str(redis.hostname), str(redis.port), GROUP, str(options["namespace"])),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    worker = Foreign()
    assert process.stdout is not None
    reading = asyncio.create_task(worker.read(process.stdout))
    try:
        yield worker
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await reading


@pytest.mark.clause("P-24", "P-7", "P-11", "P-12", "P-13", "P-14")
@pytest.mark.parametrize("language", ["bash", "node"])
async def test_a_worker_of_the_contracts_text_claims_beats_completes_fails_and_acknowledges(
    site: Site, redis_options: dict[str, object], language: str
) -> None:
    web = await site.web(
        **redis_options, lease_ms=LEASE_MS, retry_delay_ms=1, upkeep_ms=100, resend_ms=1_000
    )
    good = await enqueue(web, payload={"do": "ok"})
    slow = await enqueue(web, payload={"do": "slow"}, max_attempts=1)
    again = await enqueue(web, payload={"do": "fail", "retryable": True}, max_attempts=2)
    fatal = await enqueue(web, payload={"do": "fail", "retryable": False}, max_attempts=9)

    async def stored(job_id: str) -> dict[str, Any]:
        return dict((await web.get(f"/v1/plane/jobs/{job_id}")).json)

    async with foreign(language, web, redis_options) as worker:

        async def all_ended() -> bool:
            jobs = [await stored(job_id) for job_id in (good, slow, again, fatal)]
            return all(job["status"] in ("SUCCEEDED", "DLQ") for job in jobs)

        await until(all_ended, within_s=60)
        await until(lambda: len(worker.answers("ack")) == 5, "five acknowledgements")
    for job_id in (good, slow):
        job = await stored(job_id)
        assert (job["status"], len(job["attempts"])) == ("SUCCEEDED", 1)
        assert job["result"]["outputs"] == {"by": language}
    beats = worker.answers("heartbeat")
    assert [beat["ok"] for beat in beats] == [True] * 4
    ends = [beat["lease_expires_at"] for beat in beats]
    assert ends == sorted(set(ends)), "every heartbeat extends the lease"
    assert [(end["ok"], end["ack"]) for end in worker.answers("complete")] == [(True, True)] * 2
    failed = [
        (end["ok"], end["ack"], end["requeued"], end["dlq"]) for end in worker.answers("fail")
    ]
    assert sorted(failed) == sorted(
        [(True, True, True, False), (True, True, False, True), (True, True, False, True)]
    )
    for job_id, attempts in ((again, 2), (fatal, 1)):
        job = await stored(job_id)
        assert (job["status"], len(job["attempts"])) == ("DLQ", attempts)
        assert job["error"]["message"] == "it broke"
    redis = Redis(str(redis_options["redis"]))
    for key in ("jobs", "jobs:again"):
        pending = await redis.call("XPENDING", f"{redis_options['namespace']}{key}", GROUP)
        assert pending[0] == 0
    await redis.close()
