"""A private cluster of primaries for one run, in the place of the one server."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from harness.server import PrivateRedis, Spent, free_port
from harness.waiting import until

_SLOTS = 16_384


class PrivateCluster:
    """Primaries with equal parts of the slots and without replicas; a context manager."""

    def __init__(self, primaries: int) -> None:
        self._stack = ExitStack()
        buses = [free_port() for _ in range(primaries)]
        self.nodes = [
            self._stack.enter_context(
                PrivateRedis(settings=("--cluster-enabled", "yes", "--cluster-port", str(bus)))
            )
            for bus in buses
        ]
        edges = [_SLOTS * number // primaries for number in range(primaries + 1)]
        for number, node in enumerate(self.nodes):
            node.call("CLUSTER", "ADDSLOTS", *range(edges[number], edges[number + 1]))
            node.call("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, buses[0])
        if not until(self._is_whole, within_s=30, every_s=0.05):
            self.stop()
            raise RuntimeError("the private cluster did not form")
        self.port = self.nodes[0].port

    @property
    def url(self) -> str:
        """The address that the adapter gets."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def _is_whole(self) -> bool:
        def sees_all(node: PrivateRedis) -> bool:
            told = dict(
                line.split(":", 1) for line in node.call("CLUSTER", "INFO").decode().splitlines()
            )
            known = int(told["cluster_known_nodes"])
            return told["cluster_state"] == "ok" and known == len(self.nodes)

        return all(map(sees_all, self.nodes))

    def fresh(self) -> None:
        """Empty all nodes and start counting from zero."""
        for node in self.nodes:
            node.fresh()

    def reset_counters(self) -> None:
        """Count CPU and commands from here."""
        for node in self.nodes:
            node.reset_counters()

    def spent_each(self) -> list[Spent]:
        """What each node spent since the last reset."""
        return [node.spent() for node in self.nodes]

    def spent(self) -> Spent:
        """What all nodes spent since the last reset."""
        each = self.spent_each()
        return Spent(
            sum(one.cpu_s for one in each),
            sum(one.commands for one in each),
            sum(one.scripts for one in each),
        )

    def network_bytes(self) -> int:
        """What came in and went out of all nodes since the last reset."""
        return sum(node.network_bytes() for node in self.nodes)

    def used_memory_mb(self) -> float:
        """The memory of the data of all nodes, and of the servers themselves."""
        return sum(node.used_memory_mb() for node in self.nodes)

    def stop(self) -> None:
        self._stack.close()

    def __enter__(self) -> PrivateCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
