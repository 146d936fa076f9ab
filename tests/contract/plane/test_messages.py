"""Redis Streams as the transport: what is stale is dropped, what was lost is sent again."""

import asyncio
import contextlib
from typing import Any

import pytest

from tenure.contracts.plane import transports
from tenure.contracts.plane.model import queue_of
from tenure.contracts.plane.transports import GROUP
from tenure.core.errors import StoreError
from tenure.core.job import NewJob
from tenure.core.lease import Lease
from tenure.core.registry import parse_url
from tenure.store.embedded import EmbeddedRedis
from tenure.store.postgres import Postgres
from tenure.store.redis import Redis
from tests.contract.adapters import Servers
from tests.contract.plane.conftest import Site, claim, enqueue, proof, verb
from tests.contract.plane_stage import PostgresRedisPlaneAdapter
from tests.waiting import until


async def length(redis: Redis, options: dict[str, object]) -> int:
    return int(await redis.call("XLEN", f"{options['namespace']}jobs"))


async def pending(redis: Redis, options: dict[str, object]) -> int:
    answer = await redis.call("XPENDING", f"{options['namespace']}jobs", GROUP)
    return int(answer[0])


@pytest.mark.clause("P-3", "P-14")
async def test_a_message_carries_job_and_enqueue_id_and_goes_when_the_job_is_decided(
    site: Site, redis_options: dict[str, object]
) -> None:
    web = await site.web(**redis_options)
    redis = site.kept(Redis(str(redis_options["redis"])))
    job_id = await enqueue(web)
    key = f"{redis_options['namespace']}jobs"
    ((message_id, fields),) = await redis.call("XRANGE", key, "-", "+")
    assert fields == [b"job_id", job_id.encode(), b"enqueue_id", b"0"]
    lease = await claim(web)
    assert lease["stream"] == {"name": "jobs", "message_id": message_id.decode()}
    assert (await length(redis, redis_options), await pending(redis, redis_options)) == (1, 1)
    assert (await verb(web, "complete", **proof(lease), result=1))["ack"]
    assert (await length(redis, redis_options), await pending(redis, redis_options)) == (0, 0)


@pytest.mark.clause("P-5")
async def test_a_message_that_is_stale_or_double_is_acknowledged_and_dropped(
    site: Site, redis_options: dict[str, object]
) -> None:
    web = await site.web(**redis_options)
    redis = site.kept(Redis(str(redis_options["redis"])))
    job_id = await enqueue(web)
    key = f"{redis_options['namespace']}jobs"
    for sent in ((job_id, "0"), (job_id, "7"), ("nobody", "0"), (job_id, "x"), ("", "")):
        await redis.call("XADD", key, "*", "job_id", sent[0], "enqueue_id", sent[1])
    await redis.call("XADD", key, "*", "other", "fields")
    lease = await claim(web)
    assert await verb(web, "claim", max_jobs=10) == {"claimed": False, "jobs": []}
    assert (await length(redis, redis_options), await pending(redis, redis_options)) == (1, 1)
    assert (await verb(web, "complete", **proof(lease), result=1))["ok"]
    assert await length(redis, redis_options) == 0
    assert (await site.ledger().get(job_id)).attempt == 1  # type: ignore[union-attr]


@pytest.mark.clause("P-5")
@pytest.mark.parametrize("bad", [b"a\x00b", b"\xff\x00\xfe", b"x" * 300_000])
async def test_a_message_whose_job_id_no_database_could_hold_is_dropped_and_stops_no_claim(
    servers: Servers, bad: bytes
) -> None:
    stage = await PostgresRedisPlaneAdapter(servers.postgres, servers.redis).open()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(stage.close)
        options = parse_url(stage.served_url).options
        redis = Redis(servers.redis())
        stack.push_async_callback(redis.close)
        key = f"{options.get('namespace', '')}{options['streams']}"
        await redis.call("XADD", key, "*", "job_id", bad, "enqueue_id", "0")
        queue = stage.queue("w1")
        (good,) = await queue.submit([NewJob(task="chat", payload=b"{}")])
        (lease,) = await until(lambda: queue.claim(10, wait_ms=0), "the good job is claimed")
        assert lease.job_id == good.job_id
        assert await redis.call("XLEN", key) == 1, "the bad message is gone"


@pytest.mark.clause("P-4")
async def test_what_redis_forgot_is_sent_again(
    site: Site, redis_options: dict[str, object]
) -> None:
    web = await site.web(**redis_options, resend_ms=100)
    redis = site.kept(Redis(str(redis_options["redis"])))
    ids = {await enqueue(web) for _ in range(5)}
    key = f"{redis_options['namespace']}jobs"
    await redis.call("DEL", key, f"{key}:again")
    assert await verb(web, "claim", max_jobs=10) == {"claimed": False, "jobs": []}
    await asyncio.sleep(0.15)  # the sweeper goes by age
    await verb(web, "upkeep")
    leases = (await verb(web, "claim", max_jobs=10))["jobs"]
    assert {lease["job_id"] for lease in leases} == ids
    assert {lease["attempt"] for lease in leases} == {1}


@pytest.mark.clause("P-4")
@pytest.mark.parametrize("group", ["other", GROUP])
@pytest.mark.parametrize("last", [f"{2**64 - 1}-1", f"{2**64 - 1}-{2**64 - 1}"])
async def test_a_group_that_another_program_set_to_the_end_of_time_does_not_end_the_upkeep(
    site: Site, redis_options: dict[str, object], group: str, last: str
) -> None:
    web = await site.web(**redis_options, resend_ms=100)
    redis = site.kept(Redis(str(redis_options["redis"])))
    await enqueue(web)
    key = f"{redis_options['namespace']}jobs"
    how = "SETID" if group == GROUP else "CREATE"
    await redis.call("XGROUP", how, key, group, last)
    await asyncio.sleep(0.15)  # the sweeper goes by age
    await verb(web, "upkeep")
    await verb(web, "upkeep")


@pytest.mark.clause("P-4")
async def test_one_message_lost_among_many_is_found_while_the_stream_stays_full(
    site: Site, redis_options: dict[str, object]
) -> None:
    web = await site.web(**redis_options, resend_ms=100)
    redis = site.kept(Redis(str(redis_options["redis"])))
    lost = await enqueue(web)
    key = f"{redis_options['namespace']}jobs"
    ((message_id, _),) = await redis.call("XRANGE", key, "-", "+")
    await redis.call("XDEL", key, message_id)
    found: list[str] = []
    async with asyncio.timeout(20):
        while lost not in found:
            await enqueue(web)
            await enqueue(web)
            found.append((await claim(web))["job_id"])
            await verb(web, "upkeep")
            await asyncio.sleep(0.02)  # paces the load; the deadline bounds it


@pytest.mark.clause("P-4", "P-18")
async def test_messages_that_a_dead_plane_had_read_are_taken_on_by_another(
    site: Site, redis_options: dict[str, object]
) -> None:
    web = await site.web(**redis_options, resend_ms=60, lease_ms=60)
    redis = site.kept(Redis(str(redis_options["redis"])))
    ids = {await enqueue(web) for _ in range(3)}
    key = f"{redis_options['namespace']}jobs"
    read = await redis.call(
        *("XREADGROUP", "GROUP", GROUP, "plane-dead", "COUNT", 10, "STREAMS", key, ">")
    )
    assert len(read[0][1]) == 3
    got: set[str] = set()

    async def all_of_them() -> bool:
        await verb(web, "upkeep")
        for lease in (await verb(web, "claim", max_jobs=10))["jobs"]:
            assert lease["attempt"] == 1
            got.add(lease["job_id"])
            await verb(web, "complete", **proof(lease), result=1)
        return got == ids

    await until(all_of_them)

    async def empty() -> bool:
        await verb(web, "upkeep")
        return await length(redis, redis_options) == 0

    await until(empty)


@pytest.mark.clause("P-3")
async def test_jobs_are_taken_and_done_while_redis_is_away_and_after_it_came_back_empty(
    site: Site,
) -> None:
    server = EmbeddedRedis(appendfsync="no")
    server.start()
    options: dict[str, Any] = {"redis": server.url, "namespace": "away:", "resend_ms": 100}
    web = await site.web(**options)
    before = await enqueue(web)
    server.kill()
    during = await enqueue(web)
    seen = {(await claim(web))["job_id"] for _ in range(2)}
    assert seen == {before, during}
    after = await enqueue(web)
    for part in server.data_dir.glob("appendonlydir/*"):
        part.unlink()  # it comes back empty
    server.start()
    try:

        async def arrived() -> bool:
            await verb(web, "upkeep")
            answer = await verb(web, "claim", max_wait_ms=100)
            return bool(answer["claimed"]) and answer["job_id"] == after

        await until(arrived, within_s=20)
        redis = site.kept(Redis(server.url))

        async def flows_again() -> bool:
            await enqueue(web)
            await verb(web, "upkeep")
            try:
                return await length(redis, options) > 0
            except StoreError:
                return False

        await until(flows_again, within_s=20)
    finally:
        server.stop()


@pytest.mark.clause("P-3")
async def test_a_plane_that_died_before_it_sent_leaves_the_message_to_another(
    site: Site, redis_options: dict[str, object]
) -> None:
    """The first plane stores the job and cannot send: its Redis address leads nowhere."""
    nowhere = {**redis_options, "redis": "redis://127.0.0.1:1"}
    await enqueue(await site.web(**redis_options))
    stranded = await enqueue(await site.web(**nowhere))
    web = await site.web(**redis_options)
    redis = site.kept(Redis(str(redis_options["redis"])))
    await verb(web, "upkeep")
    entries = await redis.call("XRANGE", f"{redis_options['namespace']}jobs", "-", "+")
    assert stranded.encode() in [fields[1] for _, fields in entries]


async def _submitted_late(servers: Servers, job_id: str, *, looks: int) -> None:
    """A job is claimed whose submit ends after so many looks of a plane at its stream.

    The submit sees no registration of the stream yet, and the registration does not see its job.
    """
    stage = await PostgresRedisPlaneAdapter(servers.postgres, servers.redis).open()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(stage.close)
        url = parse_url(stage.served_url)
        database = Postgres(servers.postgres(), schema=url.options["schema"])
        stack.push_async_callback(database.close)
        queue = stage.queue("w1")

        async def look() -> list[Lease]:
            await queue.upkeep()
            return await queue.claim(1, wait_ms=0)

        async with database.connection() as connection:
            submit = connection.transaction()
            await submit.start()
            await connection.execute(
                "INSERT INTO plane_jobs (job_id, queue, task, max_attempts, created_ms, updated_ms,"
                " payload) VALUES ($1, $2, 'chat', 1, 1, 1, '{}')",
                job_id,
                queue_of(url.options["streams"]),
            )
            for _ in range(looks):
                assert await look() == []
            await submit.commit()
        (lease,) = await until(look, "the late job is claimed")
        assert lease.job_id == job_id


@pytest.mark.clause("P-3")
async def test_a_job_submitted_while_its_stream_is_registered_gets_its_message(
    servers: Servers,
) -> None:
    await _submitted_late(servers, "late", looks=1)


@pytest.mark.clause("P-3")
async def test_a_job_whose_submit_outlasts_the_rechecks_gets_its_message_later(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_RECHECK_S", (0.0,))
    monkeypatch.setattr(transports, "_RECHECK_EVERY_S", 0.1)
    await _submitted_late(servers, "longer", looks=3)
