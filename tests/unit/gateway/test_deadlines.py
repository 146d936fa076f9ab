"""Deadlines of client connections."""

from __future__ import annotations

import math
from typing import Any

from tenure.gateway.http.connections import Connections
from tenure.gateway.settings import GatewaySettings


class _Overdue:
    """A connection whose deadline has passed."""

    stalled_at = math.inf
    deadline = 0.0

    def __init__(self, number: int) -> None:
        self.address = f"10.0.{number % 200}.0/24"
        self.expired = 0

    def expire(self) -> None:
        self.expired += 1


async def test_ten_thousand_connections_are_checked_in_portions_and_none_is_left_out() -> None:
    connections = Connections(GatewaySettings(queues=("memory://",)), connections_max=20_000)
    clients: list[Any] = [_Overdue(number) for number in range(10_000)]
    assert all(map(connections.enter, clients))

    done = 0
    for _ in range(10):
        connections.sweep()
        assert sum(each.expired for each in clients) - done <= 1_000
        done = sum(each.expired for each in clients)

    assert all(each.expired == 1 for each in clients)
