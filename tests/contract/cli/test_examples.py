"""The examples run, and the Redis settings that we hand out satisfy the doctor."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tenure.store.embedded.programs import redis_program
from tests.contract.cli.conftest import Cli, Start, wait_until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    for file in (ROOT / "examples").iterdir():
        if file.is_file() and file.name != "tenure.toml":
            shutil.copy(file, tmp_path)
    return tmp_path


def test_the_greetings_end_as_their_docstrings_say(cli: Cli, start: Start, examples: Path) -> None:
    start("worker", "greetings.py").heard("worker starts")
    wait = ["--wait", "--timeout", "30"]
    greeted = cli("submit", "greet", "-d", '{"name": "Ada"}', *wait)
    assert greeted.lines == [{"text": "Hello, Ada!"}]
    refused = cli("submit", "greet", *wait)
    assert refused.code == 6
    assert 'greet needs a "name"' in refused.err
    assert cli("submit", "count", "-d", '{"to": 3}', *wait).lines == [3]
    assert cli("submit", "flaky", *wait).lines == [{"attempt": 3}]


def test_the_tools_file_lets_a_worker_use_its_tools_and_no_others(
    cli: Cli, start: Start, examples: Path
) -> None:
    start("worker", "tenure.tasks", TENURE_TOOLS="tools.toml").heard("worker starts")
    wait = ["--wait", "--timeout", "30"]
    disk = cli("submit", "tool", "-d", '{"tool": "disk", "args": {"path": "/"}}', *wait)
    assert "Filesystem" in disk.lines[0]["stdout"]
    other = cli("submit", "tool", "-d", '{"tool": "rm", "args": {}}', *wait)
    assert other.code == 6
    assert "the tools file allows: disk, gateway, uptime" in other.err


def test_the_doctor_finds_no_problem_with_the_redis_settings_we_hand_out(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("TENURE_GATEWAY_PORT", str(free_port))
    settings = ROOT / "deploy" / "systemd" / "redis-tenure.conf"
    sock = tmp_path / "r.sock"
    argv = [str(redis_program()), str(settings), "--port", "0", "--unixsocket", str(sock)]
    server = subprocess.Popen(
        [*argv, "--dir", str(tmp_path), "--save", ""], stdout=subprocess.DEVNULL
    )
    try:
        wait_until(sock.exists)
        said = cli("doctor", "-q", f"streams+redis+unix://{sock}", "--json")
        assert said.code == 0, said.out
        levels = {finding["check"]: finding["level"] for finding in said.lines}
        checks = ("append-only file", "appendfsync", "eviction")
        assert [levels[check] for check in checks] == ["ok", "ok", "ok"]
    finally:
        server.terminate()
        server.wait(20)
