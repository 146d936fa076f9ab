"""Dramatiq on Redis: Lua for every step, threads in the worker, no results (its default)."""

from __future__ import annotations

import dramatiq
from bench_kit import probe, redis_url, serve
from dramatiq.brokers.redis import RedisBroker

BEST = 16

broker = RedisBroker(url=redis_url())
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(number: int) -> None:
    probe.noop()


@dramatiq.actor
def stamp(submitted_ns: int) -> None:
    probe.stamp(submitted_ns)


@dramatiq.actor
def nap(number: int) -> None:
    probe.nap_blocking(number)


ACTORS = {"noop": noop, "stamp": stamp, "nap": nap}


class Producer:
    notes = "no result is stored (default)"
    packages = ("dramatiq", "redis", "hiredis")

    def worker(self, concurrency: int | None) -> list[str]:
        return ["dramatiq", "adapter", "--processes", "1", "--threads", str(concurrency or BEST)]

    def submit(self, task: str, argument: int) -> None:
        ACTORS[task].send(argument)

    def unfinished(self) -> int:
        # A message's body leaves this hash when it is acknowledged.
        return int(broker.client.hlen("dramatiq:default.msgs"))


if __name__ == "__main__":
    serve(Producer)
