"""How a transcode is tried again when storage fails: by the contract, up to the job's limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tenure import NewJob, Worker, open_ledger, open_queue
from tenure.cli.config import Config
from tenure.cli.handlers import load_tasks
from tenure.contracts.inbox.queue import THROTTLED_FACTOR
from tenure.core.lease import Lease
from tenure.core.outcome import Retry
from tenure.core.retry import decide_outcome
from tenure.vault import new_kek
from tests.waiting import until

FIRST_MS = 2_000
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"


def config(folder: Path) -> Config:
    environment = {
        "TENURE_VAULT_KEYS": new_kek("k1"),
        "TENURE_EGRESS_ALLOW": "127.0.0.1/32",
        "TENURE_TRANSCODE_FOLDER": str(folder / "work"),
    }
    return Config(environment, folder)


@pytest.fixture
async def busy() -> AsyncIterator[str]:
    """The endpoint of a store that answers every request with 429."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(BUSY)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.mark.clause("I-18")
@pytest.mark.parametrize("scheme", ["s3", "http"])
async def test_a_429_of_the_storage_waits_in_the_larger_bucket(
    busy: str, tmp_path: Path, scheme: str
) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db?retry_delay_ms={FIRST_MS}&synchronous=normal"
    place = {"url": "s3://in/clip.mp4", "endpoint": busy}
    source = place if scheme == "s3" else {"url": f"{busy}/clip.mp4"}
    asked = {
        "source": source,
        "destination": place,
        "outputs": [{"name": "a.jpg", "format": "jpg"}],
    }
    queue, ledger = open_queue(url), open_ledger(url)
    payload = json.dumps(asked).encode()
    await queue.submit([NewJob(task="transcode", payload=payload, job_id="j", max_attempts=9)])
    tasks = load_tasks("tenure.transcode", config(tmp_path), urls=[url])
    worker = Worker(tasks, queues=[url])
    serving = asyncio.create_task(worker.serve())
    attempts = []

    async def has_failed() -> bool:
        attempts[:] = await ledger.attempts("j")  # type: ignore[attr-defined]
        return bool(attempts)

    try:
        await until(has_failed, "the first attempt has ended", within_s=60)
    finally:
        worker.stop(at_once=True)
        await serving
        await queue.close()
        await ledger.close()
    assert (attempts[0]["verdict"], attempts[0]["error_code"]) == ("retry", "http_429")
    waits_ms = attempts[0]["due_ms"] - attempts[0]["ended_ms"]
    assert waits_ms >= THROTTLED_FACTOR * FIRST_MS / 2


@pytest.mark.clause("I-20")
@pytest.mark.parametrize("error", [OSError("broken"), TimeoutError(), Retry(), Retry(1.0)])
def test_more_than_five_attempts_are_made_when_the_job_says_so(
    tmp_path: Path, error: Exception
) -> None:
    (transcode, _) = load_tasks(
        "tenure.transcode", config(tmp_path), urls=[f"inbox+sqlite:///{tmp_path}/jobs.db"]
    )
    lease = Lease(
        job_id="j",
        queue="inbox",
        task="transcode",
        payload=b"{}",
        attempt=7,
        max_attempts=8,
        fence=7,
        token="t",
        lease_until_ms=1,
        lease_ms=1,
    )
    assert decide_outcome(lease, error, transcode.retry, 0.5).kind in ("fail", "retry")
