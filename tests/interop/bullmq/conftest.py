"""The peers of the bullmq contract: Node with BullMQ 5.61 and 6.7, on a private Redis."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Generator

import pytest

from tests.interop.bullmq.peer import Node, install

_unique = itertools.count(1)
MAJORS = (5, 6)


@pytest.fixture(scope="session", autouse=True)
def packages() -> None:
    install()


@pytest.fixture(scope="session")
def nodes(port: int) -> Generator[Callable[[int, str], Node]]:
    """A Node process by major version and key prefix; made when first asked for."""
    made: dict[tuple[int, str], Node] = {}

    def node(major: int, prefix: str = "bull") -> Node:
        if (major, prefix) not in made:
            made[major, prefix] = Node(major, port, prefix)
        return made[major, prefix]

    yield node
    for each in made.values():
        each.close()


@pytest.fixture(params=MAJORS, ids=["bullmq5", "bullmq6"])
def node(request: pytest.FixtureRequest, nodes: Callable[[int], Node]) -> Node:
    return nodes(request.param)


@pytest.fixture
def name() -> str:
    """A queue of one's own."""
    return f"q{os.getpid()}-{next(_unique)}"


@pytest.fixture
def url(server: str, name: str) -> str:
    return f"bullmq+{server}?queue={name}"


@pytest.fixture(scope="module")
def runner() -> Generator[asyncio.Runner]:
    """An event loop for tests that hypothesis calls."""
    with asyncio.Runner() as runner:
        yield runner
