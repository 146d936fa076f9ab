"""The official OmniQ client and ours on one queue of a Redis Cluster."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.interop.omniq.peer import Official, Ours, Party
from tests.redis_topologies import RedisCluster, redis_cluster

pytestmark = pytest.mark.few


@pytest.fixture(scope="module")
def cluster() -> Generator[RedisCluster]:
    with redis_cluster(replicas=False) as cluster:
        yield cluster


@pytest.mark.clause("O-1", "O-13")
async def test_what_one_publishes_the_other_takes_and_ends(
    cluster: RedisCluster, name: str
) -> None:
    official = Official("4.0.0", cluster.servers[0].port)
    ours = Ours(cluster.url)
    try:
        parties: list[tuple[Party, Party]] = [(official, ours), (ours, official)]
        for number, (publisher, taker) in enumerate(parties):
            job_id = f"j{number}"
            await publisher.ask("publish", queue=name, payload={"n": number}, job_id=job_id)
            job = await taker.ask("reserve", queue=name)
            assert job["job_id"] == job_id
            token = job["lease_token"]
            await taker.ask("ack_success", queue=name, job_id=job_id, lease_token=token)
            assert await publisher.ask("reserve", queue=name) is None
    finally:
        official.close()
        await ours.close()
