"""One Spark and one of each store for the whole suite: they start slowly, and none minds sharing.

All tests here run in one process (see `ONE_PROCESS`), beside the other suites.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tenure.pipeline import SparkSettings, open_session
from tenure.store.embedded import EmbeddedPostgres, EmbeddedRedis
from tests.spark.working import SMALL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
_unique = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session as the commands open it, made small."""
    work = tmp_path_factory.mktemp("spark")
    session = open_session(
        SparkSettings(
            master="local[2]",
            driver_memory="1g",
            quick=True,
            conf=SMALL | {"spark.local.dir": str(work)},
        )
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def redis() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def streams_url(redis: EmbeddedRedis) -> str:
    return f"streams+{redis.url}?namespace=n{os.getpid()}-{next(_unique)}:"


@pytest.fixture
def bullmq_url(redis: EmbeddedRedis) -> str:
    return f"bullmq+{redis.url}?queue=q{os.getpid()}-{next(_unique)}"


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")
