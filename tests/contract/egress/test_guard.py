"""The guard against requests that strangers aim at us: a table of spellings, and a canary."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import struct
from collections.abc import Sequence
from urllib.parse import urlsplit

import pytest

from tenure.egress import (
    Client,
    EgressError,
    Guard,
    GuardedProxy,
    Limits,
    Policy,
    RequestRefused,
    Unreachable,
)
from tenure.egress.guard import Resolve, SystemResolver
from tests.contract.egress.canary import canary

# Each means, to some program, this machine or its neighbours.
SPELLINGS = [
    "https://127.0.0.1:{port}/",
    "https://127.0.0.2:{port}/",
    "https://127.1:{port}/",
    "https://127.0.1:{port}/",
    "https://2130706433:{port}/",
    "https://0x7f000001:{port}/",
    "https://0x7f.0.0.1:{port}/",
    "https://0x7f.1:{port}/",
    "https://0177.0.0.1:{port}/",
    "https://017700000001:{port}/",
    "https://127.0.0.01:{port}/",
    "https://127.0.0.1.:{port}/",
    "https://0:{port}/",
    "https://0.0.0.0:{port}/",
    "https://localhost:{port}/",
    "https://LOCALHOST:{port}/",
    "https://localhost.:{port}/",
    "https://①②⑦.⓪.⓪.①:{port}/",
    "https://127。0。0。1:{port}/",
    "https://%31%32%37.0.0.1:{port}/",
    "https://[::1]:{port}/",
    "https://[0:0:0:0:0:0:0:1]:{port}/",
    "https://[::]:{port}/",
    "https://[::127.0.0.1]:{port}/",
    "https://[::ffff:127.0.0.1]:{port}/",
    "https://[::ffff:7f00:1]:{port}/",
    "https://[64:ff9b::7f00:1]:{port}/",
    "https://[64:ff9b:1::7f00:1]:{port}/",
    "https://[2002:7f00:1::]:{port}/",
    "https://[2001:0:7f00:1::]:{port}/",
    "https://[fe80::1%25lo]:{port}/",
    "https://[fe80::1]:{port}/",
    "https://[fc00::1]:{port}/",
    "https://[fec0::1]:{port}/",
    "https://[ff02::1]:{port}/",
    "https://169.254.169.254:{port}/latest/meta-data/",
    "https://10.0.0.1:{port}/",
    "https://172.16.0.1:{port}/",
    "https://192.168.0.1:{port}/",
    "https://100.64.0.1:{port}/",
    "https://192.0.0.1:{port}/",
    "https://198.18.0.1:{port}/",
    "https://224.0.0.1:{port}/",
    "https://255.255.255.255:{port}/",
    "https://192.88.99.1:{port}/",
    "https://8.8.8.8@127.0.0.1:{port}/",
    "https://127.0.0.1:{port}\\@8.8.8.8/",
    "https://8.8.8.8\\@127.0.0.1:{port}/",
    "https://127.0.0.1:{port}#@8.8.8.8/",
    "https://127.0.0.1\t:{port}/",
    "https:// 127.0.0.1:{port}/",
    "https://127.0.0.1:{port}/\r\nHost: x",
    "https:///127.0.0.1:{port}/",
    "https:127.0.0.1:{port}/",
    "//127.0.0.1:{port}/",
    "http://127.0.0.1:{port}/",
    "ftp://127.0.0.1:{port}/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:{port}/_x",
    "",
]
LIMITS = Limits(connect_ms=1_000, total_ms=2_000)


@pytest.mark.clause("I-53")
def test_the_table_has_at_least_forty_spellings() -> None:
    assert len(set(SPELLINGS)) == len(SPELLINGS) >= 40


@pytest.mark.clause("I-53")
async def test_no_spelling_of_a_private_address_reaches_the_canary() -> None:
    async with canary() as bird:
        client = Client(Guard(Policy(ports=(443, bird.port))), limits=LIMITS)
        answers = [
            await refusal(client, spelling.replace("{port}", str(bird.port)))
            for spelling in SPELLINGS
        ]
        await client.close()
    assert bird.hits == 0
    assert [s for s, why in zip(SPELLINGS, answers, strict=True) if why != "RequestRefused"] == []


async def refusal(client: Client, url: str) -> str:
    try:
        await client.send("POST", url, body=b"{}")
    except EgressError as error:
        return type(error).__name__
    return "answered"


@pytest.mark.clause("I-53")
async def test_the_canary_would_have_noticed_a_connection() -> None:
    async with canary() as bird:
        allowed = Policy(allow=(f"127.0.0.1:{bird.port}",))
        client = Client(Guard(allowed), limits=LIMITS)
        answer = await client.send("GET", f"http://127.0.0.1:{bird.port}/")
        await client.close()
    assert (answer.status, answer.body, bird.hits) == (200, b"ok", 1)


class Rebinding:
    """A name server that tells the truth once and lies from then on."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        return self._answers[min(self.asked, len(self._answers)) - 1]


@pytest.mark.clause("I-53")
@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["93.184.215.14", "127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["fe80::1%1"],
    ],
)
async def test_a_name_that_leads_to_a_private_address_is_refused(addresses: list[str]) -> None:
    async with canary() as bird:
        guard = Guard(Policy(ports=(bird.port,)), resolve=Rebinding(addresses))
        client = Client(guard, limits=LIMITS)
        with pytest.raises(Unreachable, match="leads to no public address"):
            await client.send("POST", f"https://hooks.example:{bird.port}/")
    assert bird.hits == 0


@pytest.mark.parametrize(
    "url", ["https://db.internal/", "http://db.internal/", "https://db.internal:5432/"]
)
@pytest.mark.parametrize("policy", [Policy(), Policy(allow=("192.0.2.0/24", "hooks.internal"))])
async def test_a_requester_cannot_learn_which_internal_names_there_are(
    policy: Policy, url: str
) -> None:
    """No such name, none in time, and every internal address are one and the same error."""

    async def fails(error: Exception) -> Sequence[str]:
        raise error

    none = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    answers = [["10.1.2.3"], ["fd00::7"], ["127.0.0.1"], ["8.8.8.8", "10.1.2.3"], []]
    resolvers: list[Resolve] = [Rebinding(answer) for answer in answers]
    resolvers += [lambda *_: fails(none), lambda *_: fails(TimeoutError())]
    told = set()
    for resolve in resolvers:
        with pytest.raises(EgressError) as raised:
            await Client(Guard(policy, resolve=resolve), limits=LIMITS).send("POST", url)
        told.add((type(raised.value), raised.value.code, str(raised.value)))
    assert len(told) == 1, told
    assert "10.1.2.3" not in str(told)


async def test_a_refused_connection_does_not_tell_the_address_of_its_name() -> None:
    guard = Guard(Policy(allow=("hooks.internal",)), resolve=Rebinding(["127.0.0.9"]))
    with pytest.raises(Unreachable, match="Connection refused") as raised:
        await Client(guard, limits=LIMITS).send("POST", "http://hooks.internal:9/")
    assert "127.0.0.9" not in str(raised.value)


@pytest.mark.clause("I-53")
async def test_a_name_is_resolved_once_and_its_second_answer_is_never_used() -> None:
    """The checked address is the one that is dialled, whatever the name means by then."""
    async with canary() as bird:
        names = Rebinding(["127.0.0.2"], ["127.0.0.1"])
        # The allow list stands for "public" here: 127.0.0.2 passes the check, 127.0.0.1 does not.
        guard = Guard(Policy(allow=("127.0.0.2/32",)), resolve=names)
        client = Client(guard, limits=LIMITS)
        with pytest.raises(EgressError, match="could not be reached"):
            await client.send("GET", f"http://hooks.example:{bird.port}/")
        assert (names.asked, bird.hits) == (1, 0)
        with pytest.raises(RequestRefused, match="only https"):
            await client.send("GET", f"http://hooks.example:{bird.port}/")
    assert (names.asked, bird.hits) == (2, 0)


@pytest.mark.clause("I-53")
async def test_the_proxy_for_libraries_refuses_the_same_table() -> None:
    async with canary() as bird:
        guard = Guard(Policy(ports=(443, bird.port)))
        async with GuardedProxy(guard) as proxy:
            for spelling in SPELLINGS:
                where = spelling.replace("{port}", str(bird.port))
                tunnel = where.removeprefix("https://").partition("/")[0]
                assert await asks(proxy, f"CONNECT {tunnel}") >= 400, spelling
                assert await asks(proxy, f"GET {where}") >= 400, spelling
    assert bird.hits == 0


@pytest.mark.clause("I-53")
async def test_the_proxy_serves_only_who_knows_its_password() -> None:
    async with canary() as bird:
        guard = Guard(Policy(allow=("127.0.0.1/32",)))
        async with GuardedProxy(guard) as proxy:
            line = f"GET http://127.0.0.1:{bird.port}/"
            assert await asks(proxy, line, password="guess") == 407
            assert bird.hits == 0
            assert await asks(proxy, line) == 200
            assert await asks(proxy, f"CONNECT 127.0.0.1:{bird.port}") == 200
    assert bird.hits == 2


async def test_the_proxy_adds_nothing_to_an_answer_that_breaks_off() -> None:
    begun, was_read = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx", asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        await was_read.wait()
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # closes with a reset
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with GuardedProxy(Guard(Policy(allow=("127.0.0.1/32",)))) as proxy:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await connect(proxy, f"GET http://127.0.0.1:{port}/")
        assert await reader.readexactly(len(begun)) == begun
        was_read.set()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
    server.close()


async def connect(
    proxy: GuardedProxy, line: str, password: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    at = urlsplit(proxy.url)
    word = base64.b64encode(f"{at.username}:{password or at.password}".encode()).decode()
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(f"{line} HTTP/1.1\r\nProxy-Authorization: Basic {word}\r\n\r\n".encode())
    return reader, writer


async def asks(proxy: GuardedProxy, line: str, password: str = "") -> int:
    reader, writer = await connect(proxy, line, password)
    answer = await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    return int(answer.split()[1])


@pytest.mark.clause("I-53")
async def test_names_whose_servers_are_silent_hold_up_no_other_lookup() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        resolve = SystemResolver([f"127.0.0.1:{silent.getsockname()[1]}"])
        waiting = [asyncio.create_task(resolve(f"h{n}.example", 443)) for n in range(100)]
        await asyncio.to_thread(silent.recv, 4096)  # the first of them asks
        async with asyncio.timeout(2):
            assert "127.0.0.1" in await resolve("localhost", 443)
        assert not any(task.done() for task in waiting)
        await resolve.close()
        assert all(
            isinstance(end, OSError)
            for end in await asyncio.gather(*waiting, return_exceptions=True)
        )
