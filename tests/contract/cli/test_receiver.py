"""`tenure receiver` as a program: a delivery arrives and is on its page."""

from __future__ import annotations

import http.client
import json
import time

from tenure.webhooks import new_secret, read_secret, signed_headers
from tenure.webhooks.signing import new_nonce
from tests.contract.cli.conftest import Start, wait_until


def get(port: int, path: str, **headers: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().read()
    finally:
        connection.close()


def answers(port: int) -> bool:
    try:
        return bool(get(port, "/"))
    except OSError:
        return False


def post(port: int, secret: str) -> int:
    body = json.dumps({"event_id": "e1", "job_id": "film-7", "seq": 1, "status": "done"}).encode()
    made = signed_headers(
        [read_secret(secret)],
        event_id="e1",
        body=body,
        now_s=int(time.time()),
        nonce=new_nonce(),
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", "/hooks", body, dict(made))
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_delivery_is_verified_and_shown(start: Start, free_port: int) -> None:
    secret = new_secret()
    start("receiver", "--port", str(free_port), TENURE_WEBHOOKS_SECRETS=f"* = {secret}")
    wait_until(lambda: answers(free_port))
    assert post(free_port, secret) == 204
    assert post(free_port, new_secret()) == 401
    page = get(free_port, "/").decode()
    assert "film-7" in page
    assert "1 verified, 0 repeated, 1 refused" in page


def test_without_a_secret_one_is_made_and_printed(start: Start, free_port: int) -> None:
    program = start("receiver", "--port", str(free_port))
    wait_until(lambda: answers(free_port))
    wait_until(lambda: program.out)
    assert post(free_port, program.out[0]) == 204


def test_a_name_that_leads_to_this_machine_is_not_answered(start: Start, free_port: int) -> None:
    """A site whose name was made to lead to loopback would read the deliveries in a browser."""
    start("receiver", "--port", str(free_port))
    wait_until(lambda: answers(free_port))
    for host in ("evil.example", f"localhost:{free_port}@evil.example", "[::1].evil.example"):
        assert get(free_port, "/deliveries", Host=host) == b"use http://127.0.0.1\n"
    assert get(free_port, "/deliveries", Host=f"localhost:{free_port}") == b"[]"
