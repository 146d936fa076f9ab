"""The limit: our own claim and settle scripts, driven by a bare pipelining client.

No worker around it, no tasks, no keeper, no event loop: a blocking socket, a hiredis parser, and
several claims in flight so that the server never waits for us. Every effect of the contract is
written, because the scripts are the very ones that the worker's queue sends; how their arguments
lie is learned from the queue itself (`Tape`), so that the two cannot drift apart.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import hiredis
from bench_kit import probe, redis_port, redis_url, serve

from tenure.contracts.streams.options import Options
from tenure.contracts.streams.queue import SCRIPTS, StreamsQueue, settle_rows
from tenure.core.job import NewJob
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome
from tenure.core.registry import open_ledger, open_queue
from tenure.store.redis import Redis, Script

BATCH = 500
CLAIMS_IN_FLIGHT = 3
CHUNK = 500
WORKER = "bare-pipelines"
LEASES = 5
"""Where the claim's answer holds its leases; its second part is the server's time."""


class Producer:
    notes = f"scripts of the streams contract, batches of {BATCH}, {CLAIMS_IN_FLIGHT} in flight"
    packages = ("tenure", "hiredis")

    def __init__(self) -> None:
        self.queue = open_queue(f"streams+{redis_url()}")
        self.ledger = open_ledger(f"streams+{redis_url()}")

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    async def submit(self, task: str, argument: int) -> None:
        await self.queue.submit([NewJob(task=task, payload=b'{"argument":%d}' % argument)])

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        jobs = [NewJob(task=task, payload=b'{"argument":%d}' % number) for number in arguments]
        for start in range(0, len(jobs), CHUNK):
            await self.queue.submit(jobs[start : start + CHUNK])

    async def unfinished(self) -> int:
        states = (await self.ledger.counts()).states
        return states["queued"] + states["running"]


class Tape:
    """Stands where the queue's connection stands, and keeps what the queue would send."""

    def __init__(self) -> None:
        self.sent: dict[str, tuple[Script, list[Any]]] = {}

    async def load(self, scripts: Iterable[Script]) -> None:
        """Nobody to load them for."""

    async def call(self, *args: Any) -> Any:
        """Nothing is stored; the queue asks whether it has shards."""

    async def run(self, script: Script, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        self.sent[script.name] = (script, [len(keys), *keys, *args])
        return [b"ok", 0, b"", b"", b"0", [], []] if script.name == "claim" else []


async def learn() -> tuple[StreamsQueue, Tape]:
    """A queue without a server, and what its claim looks like."""
    tape = Tape()
    queue = StreamsQueue(cast("Redis", tape), Options(), worker_id=WORKER)
    await queue.claim(BATCH, wait_ms=0)
    return queue, tape


class Pipeline:
    """Scripts sent ahead, replies taken in their order."""

    def __init__(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", redis_port()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()

    def load(self, script: Script) -> None:
        self.send(pack("SCRIPT", "LOAD", script.source))
        self.reply()

    def send(self, packed: bytes) -> None:
        self._socket.sendall(packed)

    def reply(self) -> Any:
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(1 << 18))
        if isinstance(reply, hiredis.ReplyError):
            raise RuntimeError(str(reply))
        return reply


class Claims:
    """One claim after the other: the last argument of each is its number."""

    def __init__(self, script: Script, taped: list[Any]) -> None:
        self._words = ("EVALSHA", script.sha, *taped[:-1])
        self._number = int(taped[-1])

    def next(self) -> bytes:
        self._number += 1
        return pack(*self._words, self._number)


class Settle:
    """The settle command for a batch, its arguments as the queue makes them."""

    def __init__(self, queue: StreamsQueue, claim_args: list[Any]) -> None:
        self._queue = queue
        keys = claim_args[0]
        self._head = ("EVALSHA", SCRIPTS["settle"].sha, *claim_args[: keys + 2])

    def command(self, leases: list[Lease]) -> bytes:
        outcomes = [Outcome(lease, "complete") for lease in leases]
        return pack(*self._head, *settle_rows(outcomes, self._queue._backoff))


def pack(*words: Any) -> bytes:
    return cast("bytes", hiredis.pack_command(words))


def work() -> None:
    """Claim and settle until the expected number of jobs has been seen and settled."""
    queue, tape = asyncio.run(learn())
    pipeline = Pipeline()
    for name in ("claim", "settle"):
        pipeline.load(SCRIPTS[name])
    claims = Claims(*tape.sent["claim"])
    settle = Settle(queue, tape.sent["claim"][1])
    awaited: deque[str] = deque()
    for _ in range(CLAIMS_IN_FLIGHT):
        pipeline.send(claims.next())
        awaited.append("claim")
    done = 0
    while awaited:
        if awaited.popleft() == "settle":
            _check(pipeline.reply())
        elif (answer := pipeline.reply())[LEASES]:
            leases = queue._leases(answer[LEASES], answer[1])
            for _ in leases:
                probe.noop()
            done += len(leases)
            more = done < probe.expect
            pipeline.send(settle.command(leases) + (claims.next() if more else b""))
            awaited += ("settle", "claim") if more else ("settle",)


def _check(verdicts: int | list[Any]) -> None:
    """Their number alone means that all were accepted."""
    if isinstance(verdicts, int):
        return
    refused = [verdict for verdict in verdicts if verdict != b"complete"]
    if refused:
        raise RuntimeError(f"{len(refused)} outcomes were not accepted: {refused[0]}")


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        work()
        signal.pause()  # our memory is still to be measured; the harness ends us
    else:
        serve(Producer)
