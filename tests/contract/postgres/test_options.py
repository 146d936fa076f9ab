"""Options of a PostgreSQL URL that limit time and name several hosts."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Generator

import asyncpg
import pytest

from tenure.cli.project import migrated
from tenure.core.errors import ReplyLost, StoreUnreachable, UsageError
from tenure.core.job import NewJob
from tenure.core.registry import open_part, open_queue, parse_url
from tests.contract.adapters import Servers
from tests.contract.ledger.test_url_options import DOORS, with_options
from tests.ports import free_port
from tests.postgres_topologies import Replicated, replicated
from tests.waiting import until


@pytest.fixture
def pair() -> Generator[Replicated]:
    with replicated() as servers:
        yield servers


@pytest.fixture
async def schema(servers: Servers) -> AsyncGenerator[str]:
    name = f"options{secrets.token_hex(4)}"
    await migrated(parse_url(f"inbox+{servers.postgres_itself()}?schema={name}"))
    yield name
    connection = await asyncpg.connect(servers.postgres_itself())
    await connection.execute(f"DROP SCHEMA {name} CASCADE")
    await connection.close()


@pytest.mark.parametrize("pooled", [False, True])
async def test_the_server_ends_a_statement_after_the_time_of_the_url(
    servers: Servers, schema: str, pooled: bool
) -> None:
    server = servers.pgbouncer("transaction").url if pooled else servers.postgres_itself()
    engine = open_part(with_options(f"inbox+{server}", statement_timeout_ms="100"), "database")
    with pytest.raises(ReplyLost, match="statement timeout"):
        await engine.database.fetch("SELECT pg_sleep(20)", [])
    await engine.database.script("SELECT pg_sleep(0.3)")  # a migration may take longer
    assert await engine.database.fetch("SELECT 1", [])
    await engine.close()


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("idle_s=0", "idle_s is 0.0"),
        ("idle_s=soon", "idle_s"),
        ("statement_timeout_ms=-1", "statement_timeout_ms"),
        ("pooling=statement", "pooling"),
        ("notify_address=postgresql://h:5432", "host:port"),
        ("notify_address=h:http", "is not a port"),
        ("channel_binding=require", "channel_binding .* asyncpg"),
        ("connect_timeout=soon", "a number of seconds"),
        ("host=a&port=high", "is not a port"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_what_would_be_right(
    query: str, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        open_part(f"inbox+postgresql://u:s3cret@h/db?{query}", "database")


@pytest.mark.parametrize("door", DOORS)
async def test_the_next_host_is_tried_when_one_is_down_at_every_door(
    servers: Servers, schema: str, door: str
) -> None:
    login, _, place = servers.postgres_itself().rpartition("@")
    url = f"inbox+{login}@127.0.0.1:{free_port()},{place}"
    await DOORS[door](with_options(url, schema=schema, target_session_attrs="read-write"))


async def test_a_queue_goes_on_at_the_replica_that_was_promoted(pair: Replicated) -> None:
    """Both hosts in the URL: the replica is passed over, until it is the primary."""
    url = with_options(f"inbox+{pair.url}", schema="tenure", target_session_attrs="read-write")
    await migrated(parse_url(url))
    queue, job = open_queue(url), NewJob(task="t", payload=b"{}")
    assert await queue.submit([job])

    async def submits() -> bool:
        try:
            return bool(await queue.submit([job]))
        except (StoreUnreachable, ReplyLost):
            return False

    await pair.replica_has_all()
    pair.primary.stop_immediately()
    assert not await submits()
    await pair.promote()
    await until(submits, within_s=60)
    await queue.close()


async def test_a_replica_takes_no_calls_and_its_connection_is_left(pair: Replicated) -> None:
    queue = open_queue(with_options(f"inbox+{pair.replica.url}", schema="tenure"))
    url = with_options(f"inbox+{pair.primary.url}", schema="tenure")
    await migrated(parse_url(url))
    await pair.replica_has_all()
    with pytest.raises(StoreUnreachable, match="read-only transaction"):
        await queue.submit([NewJob(task="t", payload=b"{}")])
    await queue.close()
