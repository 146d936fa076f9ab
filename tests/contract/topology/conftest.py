"""A cluster and a Sentinel set of this process; each test leaves them whole."""

from collections.abc import Generator

import pytest

from tests.redis_topologies import RedisCluster, SentinelSet, redis_cluster, sentinel_set


@pytest.fixture(scope="session")
def cluster() -> Generator[RedisCluster]:
    with redis_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def watched() -> Generator[SentinelSet]:
    with sentinel_set() as watched:
        yield watched
