"""submit and watch through a gateway: the same answers as from the store."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.contract.cli.conftest import Cli, Start


@pytest.fixture
def gateway_url(start: Start, free_port: int) -> str:
    start("gateway", "--port", str(free_port)).heard("gateway_ready")
    return f"http://127.0.0.1:{free_port}"


def test_submit_waits_and_follows_over_http(cli: Cli, start: Start, gateway_url: str) -> None:
    start("worker", "tenure.tasks", "--samples").heard("worker starts")
    args = ["submit", "chat", "-d", '{"prompt": "hi"}', "--gateway", gateway_url, "--timeout", "30"]
    waited = cli(*args, "--wait")
    assert (waited.code, waited.lines[0]["sample"]) == (0, True)
    followed = cli(*args, "--follow", "--json")
    types = [event["type"] for event in followed.lines]
    assert (types[0], types[-1]) == ("queued", "done")
    assert types.count("token") == 5
    job_id = followed.err.split()[1]
    assert cli("watch", job_id, "--gateway", gateway_url, "--json").lines == followed.lines
    assert cli("watch", job_id, "--json").lines == followed.lines


def test_the_gateway_s_refusals_have_the_same_exit_codes(cli: Cli, gateway_url: str) -> None:
    through = ["--gateway", gateway_url]
    assert cli("submit", "juggle", *through).code == 2
    assert cli("watch", "nobody", *through).code == 3
    key = ["--idempotency-key", "k"]
    first = cli("submit", "chat", "-d", '{"n": 1}', *key, *through)
    again = cli("submit", "chat", "-d", '{"n": 1}', *key, *through)
    assert (again.out, again.code) == (first.out, 0)
    assert "it is the job from then" in again.err
    assert cli("submit", "chat", "-d", '{"n": 2}', *key, *through).code == 4
    late = cli("submit", "chat", "--wait", "--timeout", "0.5", *through)
    assert late.code == 7


def test_a_gateway_that_is_away_is_exit_code_5(cli: Cli) -> None:
    said = cli("submit", "chat", "--gateway", "http://127.0.0.1:1")
    assert said.code == 5
    assert "the gateway http://127.0.0.1:1 does not answer" in said.err


def test_a_job_without_a_time_to_live_gets_the_gateway_s(
    cli: Cli, start: Start, free_port: int
) -> None:
    start("gateway", "--port", str(free_port), TENURE_GATEWAY_TTL_S="77").heard("gateway_ready")
    job_id = cli("submit", "chat", "--gateway", f"http://127.0.0.1:{free_port}").out.strip()
    assert cli("inspect", job_id, "--json").lines[0]["ttl_ms"] == 77_000


def test_the_contract_s_own_variable_is_the_default_time_to_live(
    cli: Cli, start: Start, free_port: int
) -> None:
    start("gateway", "--port", str(free_port), JOB_TTL_S="78").heard("gateway_ready")
    job_id = cli("submit", "chat", "--gateway", f"http://127.0.0.1:{free_port}").out.strip()
    assert cli("inspect", job_id, "--json").lines[0]["ttl_ms"] == 78_000


def test_delay_and_attempts_reach_the_job(cli: Cli, gateway_url: str) -> None:
    args = ["--delay", "60", "--max-attempts", "7", "--ttl", "600"]
    for through in ([], ["--gateway", gateway_url]):
        job_id = cli("submit", "chat", *args, *through).out.strip()
        job = cli("inspect", job_id, "--json").lines[0]
        assert (job["max_attempts"], job["ttl_ms"]) == (7, 600_000)
        assert job["due_ms"] - job["created_ms"] == 60_000


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"]
)
def test_a_gateway_that_took_the_request_and_gave_no_answer_leaves_it_in_doubt(
    cli: Cli, said: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(65_536)
            connection.sendall(said)
            connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        told = cli("submit", "chat", "--gateway", f"http://127.0.0.1:{port}")
        thread.join(10)
    assert told.code == 5
    assert "may have been executed" in told.err
