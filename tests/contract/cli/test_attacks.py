"""Attacks, most without a key, from processes of their own: everybody else is served as before."""

from __future__ import annotations

import http.client
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.cli.conftest import DEADLINE_S, Program, Start
from tests.contract.gateway.attacks import ATTACKS
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
SECONDS = 2.5
P99_MS = 100.0
# The attack takes one of two cores and the gateway the other, so what else runs there counts more
# than once: p99 was 39 ms, and 266 ms at a load of 50. It was 18 s at that load while bodies were
# read in the event loop.
LARGE_P99_MS = 250.0
BY_NUMBER = [name for name, (count, _) in ATTACKS.items() if count > 100]


@pytest.fixture(scope="module")
def ports(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Two gateways that ask for keys, one to be attacked, one to compare with.

    One address may have fewer connections than the attacks open.
    """
    limits = {"TENURE_GATEWAY_CONNECTIONS_PER_ADDRESS": "100"}
    chosen = free_port(), free_port()
    programs = []
    for port in chosen:
        words = ["gateway", "--port", str(port), "--require-key", "--redis", redis_url]
        programs.append(Program(words, tmp_path_factory.mktemp("gateway"), limits))
    for program in programs:
        program.heard("gateway_ready")
    yield chosen
    for program in programs:
        program.kill()


def asked_ms(port: int) -> float:
    """How long an answer of /livez takes, on a connection of its own."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request("GET", "/livez")
    assert connection.getresponse().read() == b"ok\n"
    connection.close()
    return (time.perf_counter() - begun) * 1000


def check(
    name: str,
    ports: tuple[int, int],
    source: str,
    *,
    seconds: float = SECONDS,
    p99_ms: float = P99_MS,
) -> None:
    """While an attack lasts, its victim answers within 100 ms, or what is given.

    What a busy machine adds to that, it adds to the answers of the other gateway as well.
    """
    attacked, quiet = ports
    words = ["-m", "tests.contract.gateway.attacks", name, "127.0.0.1", str(attacked), source]
    attack = subprocess.Popen([sys.executable, *words, str(seconds)], cwd=ROOT)
    took_ms: list[tuple[float, float]] = []
    while attack.poll() is None:
        took_ms.append((asked_ms(attacked), asked_ms(quiet)))
        time.sleep(0.005)  # the pace of the measurement
    assert attack.returncode == 0
    assert len(took_ms) >= 20
    under_attack, compared = (p99(times) for times in zip(*took_ms, strict=True))
    assert under_attack < p99_ms + compared, f"p99 {under_attack:.0f} ms, quiet {compared:.0f} ms"


def p99(values: tuple[float, ...]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


@pytest.mark.alone
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_without_a_key_holds_up_nobody(ports: tuple[int, int], name: str) -> None:
    check(name, ports, "127.0.0.2")


@pytest.mark.alone
@pytest.mark.parametrize("name", BY_NUMBER)
def test_an_attack_from_ones_own_address_holds_up_nobody(ports: tuple[int, int], name: str) -> None:
    check(name, ports, "127.0.0.1")


@pytest.mark.alone
def test_the_largest_bodies_of_eight_clients_hold_up_nobody(
    ports: tuple[int, int], redis_url: str, tmp_path: Path
) -> None:
    """They have all rights; each body gets its right answer."""
    port = free_port()
    queues = ["--queue", f"plane+sqlite:///{tmp_path}/plane.db", "--redis", redis_url]
    program = Program(["gateway", "--port", str(port), *queues], tmp_path, {})
    program.heard("gateway_ready")
    try:
        check("large_bodies", (port, ports[1]), "127.0.0.1", seconds=10, p99_ms=LARGE_P99_MS)
    finally:
        program.kill()


def test_more_connections_than_open_files_reset_nobody(redis_url: str, tmp_path: Path) -> None:
    """The gateway takes no more connections than it may have files, and a newcomer finds room."""
    port = free_port()
    gateway = f"{sys.executable} -m tenure.cli gateway --port {port} --redis {redis_url}"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TENURE_")}
    with subprocess.Popen(
        ["/bin/sh", "-c", f"ulimit -n 300; exec {gateway}"],
        cwd=tmp_path,
        env=clean,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = list(itertools.takewhile(lambda line: "gateway_ready" not in line, process.stderr))
        assert "gateway_few_open_files" in "".join(said)
        flood = []
        for _ in range(400):
            each = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
            each.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0")
            flood.append(each)
        for _ in range(20):
            asked_ms(port)
        for each in flood:
            each.close()
        process.terminate()


def test_the_admin_address_is_an_option_and_a_setting(start: Start, free_port: int) -> None:
    admin_port = free_port + 1
    program = start(
        "gateway", "--port", str(free_port), "--admin-address", f"127.0.0.1:{admin_port}"
    )
    assert f"http://127.0.0.1:{admin_port}" in program.heard("gateway_ready")
    assert [status(port, "/metrics") for port in (free_port, admin_port)] == [404, 200]
    program.kill()
    named = {"TENURE_GATEWAY_ADMIN_ADDRESS": f"127.0.0.1:{admin_port}"}
    start("gateway", "--port", str(free_port), **named).heard("gateway_ready")
    assert [status(port, "/metrics") for port in (free_port, admin_port)] == [404, 200]


def status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request("GET", path)
    answer = connection.getresponse().status
    connection.close()
    return answer
