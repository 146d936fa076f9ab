"""A contract on a Redis Cluster or a Sentinel set, whose servers the scenario itself harms."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any, Literal

from tenure.store.redis.cluster import slot_of
from tests.chaos.subject import PROFILES, RedisSubject
from tests.redis_topologies import RedisCluster, SentinelSet

Topology = Literal["", "cluster", "sentinel"]
TAG = "chaos"
# All keys of the queue share this hash tag; omniq's do by nature.
_TAGGED = {"streams": {"namespace": f"{{{TAG}}}:"}, "bullmq": {"prefix": f"{{{TAG}}}"}}
_PUT_UP = {"cluster": RedisCluster, "sentinel": SentinelSet}
_REPLICAS_MS = 500


class TopologySubject(RedisSubject):
    """A contract on Redis whose store is six servers of a cluster, or three and three Sentinels."""

    slot = slot_of(f"{{{TAG}}}")

    def __init__(
        self, contract: str, folder: Path, *, topology: Topology, replicas: int, **options: Any
    ) -> None:
        profile = PROFILES[contract]
        more: dict[str, object] = dict(_TAGGED.get(contract, {}))
        if replicas:
            more |= {"replicas": replicas, "replicas_ms": _REPLICAS_MS}
        query = profile.query
        tagged = dataclasses.replace(profile, query=lambda given: {**query(given), **more})
        super().__init__(tagged, folder, **options)
        self._folder = folder / "servers"
        self._topology = topology
        self.servers: Any = None

    @property
    def store_url(self) -> str:
        return str(self.servers.url)

    async def start(self) -> None:
        self._folder.mkdir()
        self.servers = await asyncio.to_thread(_PUT_UP[self._topology], self._folder)

    async def stop(self) -> None:
        if self.servers is not None:
            await asyncio.to_thread(self.servers.end)
