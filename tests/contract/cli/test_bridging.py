"""`tenure bridge` from every contract, killed on the way: each job arrives once."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from tenure.cli.bridge import without_lost_limit
from tenure.core.job import JobRecord, NewJob
from tenure.core.portable import is_in
from tenure.core.registry import contract_names, open_ledger, open_queue
from tenure.core.seam import Query
from tests.contract.adapters import Servers, Stage, adapters, served_url
from tests.contract.cli.conftest import Cli, Program
from tests.waiting import until

SERVED = [name for name in contract_names() if name != "memory"]
JOBS = 600


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture(params=SERVED)
async def old(request: pytest.FixtureRequest, servers: Servers) -> AsyncGenerator[Stage]:
    stage = await adapters(servers)[request.param].open(lease_ms=1_000)
    yield stage
    await stage.close()


async def jobs_of(url: str) -> list[JobRecord]:
    ledger = open_ledger(url)
    found: list[JobRecord] = []
    after = ""
    try:
        while True:
            page = await ledger.find(Query(limit=500, after=after))
            found += page.jobs
            after = page.after
            if not after:
                return found
    finally:
        await ledger.close()


async def test_a_bridge_that_is_killed_goes_on_when_it_is_started_again(
    old: Stage, queue_url: str, tmp_path: Path
) -> None:
    from_url = served_url(old)
    queue = open_queue(from_url)
    payloads = [b'{"n":%d}' % number for number in range(JOBS)]
    made = await queue.submit([NewJob(task="chat", payload=payload) for payload in payloads])
    assert all(each.accepted for each in made)
    await queue.close()
    first = Program(["bridge", "-q", from_url, "--to", queue_url], tmp_path, {})
    ledger = open_ledger(queue_url)
    try:

        async def some_arrived() -> bool:
            return sum((await ledger.counts()).states.values()) > 0

        await until(some_arrived, within_s=30)
        first.signal(signal.SIGKILL)
        assert await asyncio.to_thread(first.ended) == -signal.SIGKILL
    finally:
        first.kill()
        await ledger.close()
    again = Program(["bridge", "-q", from_url, "--to", queue_url, "--json"], tmp_path, {})
    assert await asyncio.to_thread(again.ended) == 0, again.words
    arrived = Counter(job.payload for job in await jobs_of(queue_url))
    assert arrived == Counter(payloads)
    left = [job for job in await jobs_of(from_url) if is_in(job, ("waiting", "running"))]
    assert left == []


def test_what_the_new_queue_has_no_place_for_stays_until_it_may_be_left_out(
    cli: Cli, queue_url: str, redis_url: str
) -> None:
    from_url = f"omniq+{redis_url}?queue=g{secrets.token_hex(4)}"

    async def put() -> None:
        queue = open_queue(from_url)
        jobs = [NewJob(task="a", payload=b"{}", gid=gid) for gid in ("tenant-1", "")]
        assert all(each.accepted for each in await queue.submit(jobs))
        await queue.close()

    asyncio.run(put())
    refused = cli("bridge", "-q", from_url, "--to", queue_url)
    assert refused.code == 4
    assert "1 jobs moved" in refused.out
    assert "stays where it is" in refused.err
    assert cli("bridge", "-q", from_url, "--to", queue_url, "--plain").code == 0
    assert len(asyncio.run(jobs_of(queue_url))) == 2


def test_no_job_is_given_up_because_bridges_are_killed() -> None:
    assert without_lost_limit("bullmq+redis://h/0?queue=a").endswith("?queue=a&stalled_max=1000000")
    assert without_lost_limit("inbox+sqlite:///jobs.db").endswith("jobs.db?lost_max=1000000")
    for url in ("omniq+redis://h/0?queue=a", "streams+redis://h/0?lost_max=3"):
        assert without_lost_limit(url) == url


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("nonsense", "streams+redis://127.0.0.1:1/0"), 2, "is not a queue URL"),
        (("strems+redis://127.0.0.1:1/0", "memory://a"), 2, "did you mean 'streams'"),
        (("streams+redis://127.0.0.1:1/0", "memory://a"), 5, "tenure doctor"),
        (("streams+redis://h/0?lease=5", "memory://a"), 2, "did you mean 'lease_ms'"),
        (("bullmq+redis://h/0?queue=a:b", "memory://a"), 2, "no colon"),
        (("plane+http://h:1?streams=a", "memory://a"), 2, "at its database"),
        (("memory://a", "memory://a"), 2, "a bridge needs two"),
    ],
)
def test_a_bridge_without_two_queues_says_why(
    cli: Cli, words: tuple[str, str], code: int, told: str
) -> None:
    begin = time.monotonic()
    said = cli("bridge", "-q", words[0], "--to", words[1])
    assert (said.code, told in said.err) == (code, True), said.err
    assert time.monotonic() - begin < 20


async def three_in(url: str) -> None:
    queue = open_queue(url)
    soon, late = NewJob(task="t", payload=b"{}"), NewJob(task="t", payload=b"{}", delay_ms=60_000)
    assert all(each.accepted for each in await queue.submit([soon, soon, late]))
    await queue.close()


def standing(url: str) -> list[tuple[str, str, int]]:
    """What is in a queue, as somebody sees it who would work it now."""
    return sorted((job.job_id, job.state, job.attempt) for job in asyncio.run(jobs_of(url)))


@pytest.mark.parametrize(
    "target", ["streams+redis://127.0.0.1:1/0", "inbox+sqlite:///no/such/x.db"]
)
def test_a_new_queue_that_is_away_leaves_the_old_one_as_it_was(
    cli: Cli, tmp_path: Path, target: str
) -> None:
    from_url = f"inbox+sqlite:///{tmp_path}/old.db"
    asyncio.run(three_in(from_url))
    before = standing(from_url)
    said = cli("bridge", "-q", from_url, "--to", target)
    assert (said.code, "tenure doctor" in said.err) == (5, True), said.err
    assert standing(from_url) == before, "nothing is held, no attempt is counted"
    assert cli("bridge", "-q", from_url, "--to", f"inbox+sqlite:///{tmp_path}/new.db").code == 0
    assert standing(from_url) == []
    assert len(standing(f"inbox+sqlite:///{tmp_path}/new.db")) == 3


@pytest.mark.parametrize("contract", SERVED)
async def test_a_queue_by_two_urls_is_no_bridge_and_stays_as_it_was(
    cli: Cli, servers: Servers, contract: str
) -> None:
    stage = await adapters(servers)[contract].open(lease_ms=5_000)
    url = served_url(stage)
    try:
        await three_in(url)
        before = await asyncio.to_thread(standing, url)
        said = await asyncio.to_thread(cli, "bridge", "-q", url, "--to", f"{url}&unread_days=29")
        assert (said.code, "a bridge needs two" in said.err) == (2, True), said.err
        assert await asyncio.to_thread(standing, url) == before
    finally:
        await stage.close()


@pytest.mark.parametrize(
    ("old", "new"),
    [("inbox+sqlite:///{}?queue=a", "inbox+sqlite:///{}?queue=b"),
     ("plane+sqlite:///{}?streams=a", "plane+sqlite:///{}?streams=b")],
)  # fmt: skip
def test_two_queues_of_one_database_are_two(cli: Cli, tmp_path: Path, old: str, new: str) -> None:
    from_url, to_url = (url.format(tmp_path / "both.db") for url in (old, new))
    asyncio.run(three_in(from_url))
    said = cli("bridge", "-q", from_url, "--to", to_url)
    assert said.code == 0, said.err
    assert standing(from_url) == []
    assert len(standing(to_url)) == 3
