"""The private PostgreSQL of one benchmark run: a database of its own for every measurement.

Contenders find it in `BENCH_POSTGRES_URL`. `BENCH_SYNCHRONOUS_COMMIT=off` in the environment of the
harness is the setting for all of them.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
from functools import cache

import asyncpg

from harness import processes
from tenure.store.embedded import EmbeddedPostgres

_numbers = itertools.count(1)


class PrivatePostgres:
    """Started when first needed, ended with the harness."""

    def __init__(self) -> None:
        self._server = EmbeddedPostgres()
        self._server.start()
        atexit.register(self._server.stop)
        self._cpu_before_s = 0.0

    def fresh(self) -> str:
        """An empty database; its URL is what contenders get."""
        name = f"bench{next(_numbers)}"
        synchronous = os.environ.get("BENCH_SYNCHRONOUS_COMMIT", "on")
        asyncio.run(self._create(name, synchronous))
        url = f"{self._server.url.rpartition('/')[0]}/{name}"
        os.environ["BENCH_POSTGRES_URL"] = url
        return url

    def reset(self) -> None:
        """Count CPU from here."""
        self._cpu_before_s = self._cpu_s()

    def spent_cpu_s(self) -> float:
        """CPU of the server since the last reset, with that of backends that ended meanwhile."""
        return self._cpu_s() - self._cpu_before_s

    def _cpu_s(self) -> float:
        assert self._server.pid is not None
        return processes.usage(self._server.pid).cpu_s + processes.reaped_cpu_s(self._server.pid)

    async def _create(self, name: str, synchronous: str) -> None:
        connection = await asyncpg.connect(self._server.url)
        try:
            await connection.execute(f"CREATE DATABASE {name}")
            await connection.execute(
                f"ALTER DATABASE {name} SET synchronous_commit = '{synchronous}'"
            )
        finally:
            await connection.close()


@cache
def shared_postgres() -> PrivatePostgres:
    """The server of this run; started when it is first asked for."""
    return PrivatePostgres()
