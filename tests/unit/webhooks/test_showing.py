"""The receiver with a page: what it believes, what it shows, and that it shows it safely."""

from __future__ import annotations

import json
import time
from typing import Any

from tenure.webhooks import new_secret, read_secret, signed_headers
from tenure.webhooks.receiver import ReceiverPage
from tenure.webhooks.signing import new_nonce

SECRET = new_secret()


async def ask(
    app: ReceiverPage, method: str, path: str, *, headers: Any = (), body: bytes = b""
) -> tuple[int, bytes]:
    sent: list[Any] = []
    raw = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


async def deliver(app: ReceiverPage, secret: str = SECRET, **event: Any) -> int:
    body = json.dumps({"event_id": "e1", "job_id": "j1", "seq": 1, "status": "done"} | event)
    made = signed_headers(
        [read_secret(secret)],
        event_id=event.get("event_id", "e1"),
        body=body.encode(),
        now_s=int(time.time()),
        nonce=new_nonce(),
    )
    return (await ask(app, "POST", "/hooks", headers=made, body=body.encode()))[0]


async def test_deliveries_are_shown_with_what_became_of_them() -> None:
    app = ReceiverPage([SECRET])
    assert await deliver(app) == 204
    assert await deliver(app) == 204
    assert await deliver(app, new_secret()) == 401
    assert [one.verdict for one in app.shown] == ["refused", "repeated", "verified"]
    status, page = await ask(app, "GET", "/")
    assert status == 200
    assert b"1 verified, 1 repeated, 1 refused" in page
    _, listed = await ask(app, "GET", "/deliveries")
    assert [one["verdict"] for one in json.loads(listed)] == ["refused", "repeated", "verified"]


async def test_what_an_event_says_cannot_become_part_of_the_page() -> None:
    app = ReceiverPage([SECRET])
    nasty = '<script>alert("x")</script>'
    assert await deliver(app, job_id=nasty, status=nasty, seq=nasty) == 204
    _, page = await ask(app, "GET", "/")
    assert b"<script" not in page
    assert b"&lt;script&gt;" in page


async def test_a_body_without_end_and_a_wrong_path_are_refused() -> None:
    app = ReceiverPage([SECRET])
    assert (await ask(app, "POST", "/hooks", body=b"x" * 1_000_001))[0] == 413
    assert (await ask(app, "POST", "/"))[0] == 404
    assert (await ask(app, "GET", "/hooks"))[0] == 404
    assert not app.shown
