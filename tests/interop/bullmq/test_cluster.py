"""Node's BullMQ, by ioredis' own cluster client, and ours on one queue of a Redis Cluster."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tenure.contracts.bullmq import Flow, open_events, open_producer
from tenure.store.redis.cluster import slot_of
from tests.interop.bullmq.ours import worker
from tests.interop.bullmq.peer import Node
from tests.redis_topologies import RedisCluster, redis_cluster

pytestmark = pytest.mark.few

PREFIX = "{bull}"


@pytest.fixture(scope="module")
def cluster() -> Generator[RedisCluster]:
    with redis_cluster(replicas=False) as cluster:
        yield cluster


@pytest.fixture(params=(5, 6), ids=["bullmq5", "bullmq6"])
def clustered(request: pytest.FixtureRequest, cluster: RedisCluster) -> Generator[Node]:
    node = Node(request.param, f"cluster:{cluster.servers[0].port}", PREFIX)
    yield node
    node.close()


def move(cluster: RedisCluster) -> None:
    slot = slot_of(PREFIX)
    source, target = cluster.begin_move(slot)
    while cluster.move_keys(slot, source, target):
        pass
    cluster.end_move(slot, source, target)


@pytest.mark.clause("B-1", "B-31")
async def test_node_and_ours_feed_each_other_before_and_after_the_slot_moved(
    cluster: RedisCluster, clustered: Node, name: str
) -> None:
    url = f"bullmq+{cluster.url}?queue={name}&prefix={PREFIX}"
    await clustered.aask(do="follow", queue=name)
    for number in range(2):
        async with worker(url):
            job = await clustered.acall(f"queue:{name}", "add", "work", {"result": number}, {})
            assert await clustered.aask(do="until", queue=name, id=job["id"]) == number
        producer, events = open_producer(url), open_events(url)
        await clustered.aask(do="work", queue=name, **{"as": name})
        job_id = await producer.add("work", {"result": number})
        assert await events.finished(job_id, timeout_ms=10_000) == number
        child = Flow(name="work", queue=name, data={"result": 1})
        root = await producer.add_flow(Flow(name="work", data={"result": 2}, children=[child]))
        assert await events.finished(root, timeout_ms=10_000) == 2
        await clustered.aask(do="stop", **{"as": name})
        await producer.close()
        await events.close()
        if not number:
            move(cluster)
