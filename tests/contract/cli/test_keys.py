"""API keys by command line, and the gateway that obeys them."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from tests.contract.cli.conftest import Cli, Start, wait_until


def test_a_key_is_shown_once_listed_without_its_secret_and_revoked(cli: Cli) -> None:
    assert "no keys" in cli("keys", "ls").err
    made = cli("keys", "create", "terminal", "--days", "30")
    key = made.out.strip()
    assert key.startswith("lh_")
    (listed,) = cli("keys", "ls", "--json").lines
    assert (listed["name"], sorted(listed["scopes"])) == (
        "terminal",
        ["jobs:cancel", "jobs:read", "jobs:write"],
    )
    assert key.split("_")[2] not in cli("keys", "ls").out + str(listed)
    assert cli("keys", "revoke", listed["id"]).code == 0
    assert cli("keys", "revoke", listed["id"]).code == 3
    assert cli("keys", "create", "--scope", "everything").code == 2


def test_a_gateway_asks_for_the_key_and_submit_shows_it(
    cli: Cli, start: Start, free_port: int
) -> None:
    key = cli("keys", "create").out.strip()
    gateway = start("gateway", "--port", str(free_port), "--require-key")
    gateway.heard("gateway_ready")
    url = f"http://127.0.0.1:{free_port}"
    refused = cli("submit", "chat", "--gateway", url)
    assert refused.code == 1
    assert "401" in refused.err
    taken = start("submit", "chat", "--gateway", url, LEASEHOLD_API_KEY=key)
    assert taken.ended() == 0
    assert cli("ls", "--json").lines[0]["job_id"] == taken.out[0]


def test_a_gateway_open_to_the_network_without_a_key_does_not_start(
    start: Start, free_port: int
) -> None:
    gateway = start("gateway", "--host", "0.0.0.0", "--port", str(free_port))
    assert gateway.ended() == 2
    assert "create a key with `leasehold keys create`" in gateway.words


def test_a_gateway_drains_on_sigterm_and_a_taken_port_is_told(start: Start, free_port: int) -> None:
    gateway = start("gateway", "--port", str(free_port))
    gateway.heard("gateway_ready")
    second = start("gateway", "--port", str(free_port))
    assert second.ended() == 2
    assert f"cannot listen on 127.0.0.1:{free_port}" in second.words
    gateway.process.terminate()
    assert gateway.ended() == 0
    wait_until(lambda: not _answers(free_port))


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_a_burst_worker_without_a_key_ends_with_an_error(
    start: Start, free_port: int, tmp_path: Path
) -> None:
    serves = ["gateway", "--port", str(free_port), "--from", "plane+sqlite:///plane.db"]
    plane = start(*serves, "--require-key")
    plane.heard("gateway_ready")
    (tmp_path / "app.py").write_text(
        'from leasehold import task\n\n\n@task("t")\ndef t(job): ...\n'
    )
    url = f"plane+http://127.0.0.1:{free_port}"
    worker = start("worker", "app.py", "--burst", "--from", url)
    assert worker.ended() == 1
    assert "401" in worker.words
    assert "Traceback" not in worker.words


@pytest.mark.parametrize("store", ["redis", "sqlite"])
def test_a_key_gets_numbers_of_its_own_and_loses_them_again(
    cli: Cli, queue_url: str, tmp_path: Path, store: str
) -> None:
    url = queue_url if store == "redis" else f"plane+sqlite:///{tmp_path}/plane.db"
    made = cli("keys", "create", "shop", "--rate", "50", "--depth", "1000", "-q", url, "--json")
    key_id = made.lines[0]["id"]

    def quota() -> dict[str, float]:
        quotas: dict[str, dict[str, float]] = {
            line["id"]: line.get("quota", {})
            for line in cli("keys", "ls", "-q", url, "--json").lines
        }
        return quotas[key_id]

    assert quota() == {"rate_per_s": 50, "depth": 1000}
    said = cli("keys", "limit", key_id, "--streams", "3", "--transcodes", "0", "-q", url)
    assert (said.code, said.out.strip()) == (0, f"{key_id} streams 3, transcodes 0")
    assert quota() == {"streams": 3, "transcodes": 0}
    assert "streams 3" in cli("keys", "ls", "-q", url).out
    assert cli("keys", "limit", key_id, "-q", url).out.strip() == f"{key_id} is as every key"
    assert quota() == {}
    assert cli("keys", "limit", "nobody", "-q", url).code == 3
    assert cli("keys", "limit", key_id, "--rate", "-1", "-q", url).code == 2
