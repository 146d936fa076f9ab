"""Deadlines of client connections."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from tenure.gateway.http.connections import Connections
from tenure.gateway.settings import GatewaySettings


async def test_ten_thousand_connections_are_checked_in_portions_and_none_is_left_out() -> None:
    connections = Connections(GatewaySettings(), connections_max=20_000)
    checked: list[int] = []

    def connection(number: int) -> Any:
        return SimpleNamespace(
            address=f"10.0.{number % 200}.0/24",
            stalled_at=math.inf,
            deadline=0.0,
            expire=lambda: checked.append(number),
        )

    for number in range(10_000):
        assert connections.enter(connection(number))
    sizes = []
    for _ in range(10):
        before = len(checked)
        connections.sweep()
        sizes.append(len(checked) - before)
    assert sorted(checked) == list(range(10_000))
    assert max(sizes) == 1_000
