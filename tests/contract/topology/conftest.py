"""A cluster and a Sentinel set of this process; each test finds them whole."""

from collections.abc import Generator

import pytest

from tests.redis_topologies import RedisCluster, SentinelSet, redis_cluster, sentinel_set, until


@pytest.fixture(scope="session")
def one_cluster() -> Generator[RedisCluster]:
    with redis_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(one_cluster: RedisCluster) -> RedisCluster:
    until(one_cluster.is_whole, "the cluster is whole again", within_s=60)
    return one_cluster


@pytest.fixture(scope="session")
def one_set() -> Generator[SentinelSet]:
    with sentinel_set() as watched:
        yield watched


@pytest.fixture
def watched(one_set: SentinelSet) -> SentinelSet:
    until(one_set.is_whole, "the Sentinels see a primary and two replicas again", within_s=60)
    return one_set
