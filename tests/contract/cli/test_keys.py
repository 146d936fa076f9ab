"""API keys by command line, and the gateway that obeys them."""

from __future__ import annotations

import http.client
import os
import pwd
import tomllib
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.contract.cli.conftest import Cli, Start, wait_until
from tests.contract.cli.pages import console, page


def test_a_key_is_shown_once_listed_without_its_secret_and_revoked(cli: Cli) -> None:
    assert "no keys" in cli("keys", "ls").err
    made = cli("keys", "create", "terminal", "--days", "30")
    key = made.out.strip()
    assert key.startswith("tn_")
    (listed,) = cli("keys", "ls", "--json").lines
    assert (listed["name"], sorted(listed["scopes"])) == (
        "terminal",
        ["jobs:cancel", "jobs:read", "jobs:write"],
    )
    assert key.split("_")[2] not in cli("keys", "ls").out + str(listed)
    assert cli("keys", "revoke", listed["id"]).code == 0
    assert cli("keys", "revoke", listed["id"]).code == 3
    assert cli("keys", "create", "--scope", "everything").code == 2


@pytest.mark.parametrize("store", ["redis", "sqlite"])
def test_what_the_command_does_to_keys_is_in_the_audit_log(
    cli: Cli, tmp_path: Path, store: str
) -> None:
    where = ["-q", f"inbox+sqlite:///{tmp_path}/jobs.db"] if store == "sqlite" else []
    key_id = cli("keys", "create", "tenant", "--json", *where).lines[0]["id"]
    assert cli("keys", "limit", key_id, "--rate", "5", *where).code == 0
    assert cli("keys", "revoke", key_id, *where).code == 0
    assert cli("keys", "revoke", key_id, *where).code == 3, "nothing was done: no entry"
    entries = [line["entry"] for line in cli("audit", "export", *where).lines]
    assert [(each["action"], each["whose"], each["outcome"]) for each in entries] == [
        ("create key", [key_id], "jobs:write jobs:read jobs:cancel"),
        ("limit key", [key_id], "rate_per_s 5"),
        ("revoke key", [key_id], "ok"),
    ]
    assert {each["who"] for each in entries} == {f"cli:{pwd.getpwuid(os.getuid()).pw_name}"}
    assert cli("audit", "verify", *where).code == 0


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
    taken = start("submit", "chat", "--gateway", url, TENURE_API_KEY=key)
    assert taken.ended() == 0
    assert cli("ls", "--json").lines[0]["job_id"] == taken.out[0]


def test_a_gateway_open_to_the_network_without_a_key_does_not_start(
    start: Start, free_port: int
) -> None:
    gateway = start("gateway", "--host", "0.0.0.0", "--port", str(free_port))
    assert gateway.ended() == 2
    assert "create a key with `tenure keys create`" in gateway.words


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
    serves = ["gateway", "--port", str(free_port), "--queue", "plane+sqlite:///plane.db"]
    plane = start(*serves, "--require-key")
    plane.heard("gateway_ready")
    (tmp_path / "app.py").write_text('from tenure import task\n\n\n@task("t")\ndef t(job): ...\n')
    url = f"plane+http://127.0.0.1:{free_port}"
    worker = start("worker", "app.py", "--burst", "--queue", url)
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


PAGE = "docs/operating/signing-in.md"


def ask(
    port: int, method: str, path: str, body: str = "", **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body or None, sent)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


@pytest.mark.runs("docs/operating/signing-in.md:console")
def test_who_is_signed_in_is_listed_and_signed_out(cli: Cli, start: Start, free_port: int) -> None:
    key = cli("keys", "create", "--scope", "observe").out.strip()
    start("gateway", "--port", str(free_port)).heard("gateway_ready")
    assert "no sessions" in cli("keys", "sessions").err
    form = {"content_type": "application/x-www-form-urlencoded", "sec_fetch_site": "same-origin"}

    def sign_in() -> str:
        made = ask(free_port, "POST", "/login", urlencode({"key": key}), **form)
        return str(made.headers["set-cookie"]).partition(";")[0]

    one, two = sign_in(), sign_in()
    (block,) = [block.text for block in page(PAGE).blocks if block.language == "console"]
    (listing, shown), (ending, said) = console(block)
    table = cli(*listing.split()[1:]).out.splitlines()
    assert table[0].split("  ")[0] == shown.splitlines()[0].split("  ")[0]
    assert len(table) == 3
    first, *_ = cli("keys", "sessions", "--json").lines
    assert one.partition("=")[2] not in str(first)
    assert ask(free_port, "GET", "/jobs", cookie=one).status == 200
    assert cli("keys", "sign-out", first["session_h"][:12]).out == said
    assert ask(free_port, "GET", "/jobs", cookie=one).status == 303
    assert ask(free_port, "GET", "/jobs", cookie=two).status == 200
    words = ending.replace('"$KEY_ID"', first["key_id"]).split()[1:]
    assert cli(*words).out == said
    assert ask(free_port, "GET", "/jobs", cookie=two).status == 303
    assert cli(*words).code == 3
    assert cli("keys", "sign-out").code == 2


@pytest.mark.runs("docs/operating/signing-in.md:toml")
@pytest.mark.parametrize("by", ["file", "environment", "flags"])
def test_people_sign_in_at_the_proxy_that_the_settings_name(
    start: Start, free_port: int, tmp_path: Path, by: str
) -> None:
    (block,) = [block.text for block in page(PAGE).blocks if block.language == "toml"]
    flags, environment = [], {}
    if by == "file":
        (tmp_path / "tenure.toml").write_text(block)
    else:
        table = tomllib.loads(block)["gateway"]
        proxies, groups = table["trusted_proxies"], table["sso_groups"]
        if by == "flags":
            flags = [f"--trusted-proxy={each}" for each in proxies]
            flags += [f"--sso-group={each}" for each in groups]
        else:
            environment["TENURE_GATEWAY_TRUSTED_PROXIES"] = ",".join(proxies)
            environment["TENURE_GATEWAY_SSO_GROUPS"] = ",".join(groups)
    start("gateway", "--port", str(free_port), *flags, **environment).heard("gateway_ready")
    zoe = {"x_forwarded_user": "zoe", "x_forwarded_groups": "ops"}
    assert ask(free_port, "GET", "/", **zoe).status == 200
    assert ask(free_port, "POST", "/api/queues/streams/pause", **zoe).status == 200
    sam = {"x_forwarded_user": "sam", "x_forwarded_groups": "support"}
    assert ask(free_port, "POST", "/api/queues/streams/pause", **sam).status == 403
    assert ask(free_port, "GET", "/api/queues").status == 401
