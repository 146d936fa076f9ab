"""An event of an outbox that no receiver wanted, for tests of what people see of it."""

from __future__ import annotations

from tenure.core.job import NewJob
from tenure.core.outcome import Failure, Outcome
from tenure.core.registry import open_queue


async def given_up(url: str) -> str:
    """The id of such an event, made in the inbox at `url`."""
    hook = {"status_webhook_url": "https://me:pw@hooks.example/jobs?token=hidden-word"}
    inbox, outbox = open_queue(url, worker_id="w1"), open_queue(f"{url}&box=outbox")
    try:
        await inbox.submit([NewJob(task="greet", payload=b"{}", options=hook)])
        assert await inbox.claim(1, wait_ms=1_000)
        (event,) = await outbox.claim(1, wait_ms=1_000)
        failure = Failure(code="http_410", message="410 Gone")
        await outbox.settle([Outcome(event, "bury", failure=failure)])
        return event.job_id
    finally:
        await inbox.close()
        await outbox.close()
