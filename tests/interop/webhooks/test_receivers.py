"""The example receivers, run as their readers would run them, and fed by real deliveries."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tenure.core.lease import Lease
from tenure.core.outcome import Retry
from tenure.egress import Client, Guard, Policy
from tenure.vault import Secret
from tenure.webhooks import new_secret, read_secret, signed_headers
from tenure.webhooks.deliver import delivery_handler
from tenure.webhooks.signing import new_nonce
from tests.interop.npm import installed

EXAMPLES = Path(__file__).parents[3] / "examples" / "receivers"
OLD, NEW = new_secret(), new_secret()


class Kept:
    def __init__(self, *secrets: str) -> None:
        self.secrets = secrets

    async def live(self, requester_id: str) -> Sequence[Secret]:
        return [Secret(read_secret(one)) for one in self.secrets]


class Attempt:
    """One attempt at one event, as the outbox leases it."""

    attempt = 1

    def __init__(self, url: str, seq: int, status: str = "processing") -> None:
        event = {"event_id": f"j1.{seq}", "job_id": "j1", "seq": seq, "status": status}
        self.lease = Lease(
            job_id=f"j1.{seq}",
            queue="outbox",
            task="webhook",
            payload=json.dumps(event).encode(),
            attempt=1,
            max_attempts=10,
            fence=1,
            token="",
            lease_until_ms=0,
            lease_ms=30_000,
            requester="acme",
            webhook_url=url,
        )


@asynccontextmanager
async def program(*command: str, ready: str, **environment: str) -> AsyncIterator[str]:
    """A receiver in a process of its own; its address when it says that it listens."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            while ready not in (line := (await process.stdout.readline()).decode()):
                assert line, "the receiver ended"
        port = "".join(c for c in line.rpartition(":")[2] if c.isdigit())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.communicate()


Receiver = Callable[[str], Any]


@pytest.fixture(params=["fastapi", "express"])
async def receiver(request: pytest.FixtureRequest, tmp_path: Path) -> Receiver:
    """Starts one of the two with the secrets given."""
    if request.param == "express":
        node = await asyncio.to_thread(installed, EXAMPLES / "express")
        app = str(EXAMPLES / "express" / "app.mjs")
        return lambda secrets: program(
            str(node), app, ready="listening", WEBHOOK_SECRETS=secrets, PORT="0"
        )
    serve = [sys.executable, "-m", "uvicorn", "fastapi_receiver:app", "--port", "0"]
    where = ["--app-dir", str(EXAMPLES)]
    return lambda secrets: program(
        *serve,
        *where,
        ready="Uvicorn running on http://127.0.0.1:",
        WEBHOOK_SECRETS=secrets,
        RECEIVER_DB=str(tmp_path / "receiver.db"),
        PYTHONPATH=os.pathsep.join(sys.path),
    )


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made = Client(Guard(Policy(allow=("127.0.0.1/32",))))
    yield made
    await made.close()


async def test_deliveries_are_accepted_and_repetitions_answered_kindly(
    receiver: Receiver, client: Client
) -> None:
    deliver = delivery_handler(client, Kept(OLD), standard=True)
    async with receiver(OLD) as at:
        for seq in (1, 2, 2, 3):
            assert (await deliver(Attempt(f"{at}/hooks", seq)))["status"] == 204


async def test_a_wrong_secret_is_refused_with_401(receiver: Receiver, client: Client) -> None:
    deliver = delivery_handler(client, Kept(NEW))
    async with receiver(OLD) as at:
        with pytest.raises(Retry) as caught:
            await deliver(Attempt(f"{at}/hooks", 1))
    assert caught.value.code == "http_401"


@pytest.mark.parametrize("takes", ["old", "new", "new,old"])
async def test_a_sender_in_rotation_is_understood_with_either_secret(
    receiver: Receiver, client: Client, takes: str
) -> None:
    known = takes.replace("old", OLD).replace("new", NEW)
    deliver = delivery_handler(client, Kept(NEW, OLD))
    async with receiver(known) as at:
        assert (await deliver(Attempt(f"{at}/hooks", 1)))["status"] == 204


async def test_a_replay_a_stale_stamp_and_a_changed_body_are_refused(
    receiver: Receiver, client: Client
) -> None:
    body = Attempt("", 1).lease.payload
    now_s = int(time.time())

    def headers(at_s: int) -> list[tuple[str, str]]:
        key = [read_secret(OLD)]
        return signed_headers(key, event_id="j1.1", body=body, now_s=at_s, nonce=new_nonce())

    once = headers(now_s)
    stale, future = headers(now_s - 400), headers(now_s + 400)
    other_id = [*once[:3], ("x-euterpe-event-id", "j1.2")]
    async with receiver(OLD) as at:

        async def post(made: list[tuple[str, str]], sent: bytes = body) -> int:
            return (await client.send("POST", f"{at}/hooks", headers=made, body=sent)).status

        assert await post(other_id) == 401
        assert await post(once, body + b" ") == 401
        assert await post(once) == 204
        assert await post(once) == 401
        assert await post(stale) == 401
        assert await post(future) == 401
        assert await post(once[1:]) == 401


async def test_an_older_event_that_comes_late_does_not_turn_the_state_back(
    client: Client, receiver: Receiver, request: pytest.FixtureRequest
) -> None:
    deliver = delivery_handler(client, Kept(OLD))
    async with receiver(OLD) as at:
        await deliver(Attempt(f"{at}/hooks", 5, "succeeded"))
        await deliver(Attempt(f"{at}/hooks", 4, "uploading"))
        if "fastapi" in request.node.name:
            known = await client.send("GET", f"{at}/jobs/j1")
            assert json.loads(known.body) == {"job_id": "j1", "seq": 5, "status": "succeeded"}
