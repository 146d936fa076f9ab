"""What every Python adapter shares: the JSON-lines loop, and the probe its handlers report to.

An adapter is two things in one file. Started by the harness without arguments it is the *producer*:
it reads one JSON request a line on stdin and answers one JSON object a line on stdout. Imported by
the peer's own worker (its command line, its pool) it only defines the handlers, and these tell the
`probe` what happened. Time stamps are CLOCK_MONOTONIC, which on Linux all processes share.

Only the standard library is used here: this file runs inside every peer's environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Protocol

NAP_S = 0.05
IN_FLIGHT = 50
WARM_UP = 0
"""The submit time of a job that only wakes the worker up; it is not counted."""


class Probe:
    """Handler-side counters of one worker process; the files it writes are read by the harness.

    `BENCH_PROBE` names the file, `BENCH_EXPECT` how many jobs make the run complete. Nothing is
    written while jobs run, except by naps, whose log must survive a kill -9.
    """

    def __init__(self) -> None:
        self.path = Path(os.environ.get("BENCH_PROBE", os.devnull))
        self.expect = int(os.environ.get("BENCH_EXPECT", "0"))
        self._count = itertools.count(1)
        self._first: dict[str, int] = {}
        self._waits_ns: list[int] = []
        self._log_fd = -1

    def noop(self) -> None:
        """A job that does nothing: only the first and the last look at the clock."""
        count = next(self._count)
        if count == 1:
            self._first = {"first_ns": time.monotonic_ns(), "cpu_first_ns": time.process_time_ns()}
        if count == self.expect:
            self._finish(count)

    def stamp(self, submitted_ns: int) -> None:
        """A job that says how long it waited between the submit call and this line."""
        now_ns = time.monotonic_ns()
        if submitted_ns == WARM_UP:
            self.path.with_suffix(".ready").touch()
            return
        self._waits_ns.append(now_ns - submitted_ns)
        if not self._first:
            self._first = {"first_ns": now_ns, "cpu_first_ns": time.process_time_ns()}
        if len(self._waits_ns) == self.expect:
            self._finish(self.expect)

    def nap_begin(self, number: int) -> None:
        """Log that job `number` starts; the line outlives the process."""
        self._log(f"begin {number} {time.monotonic_ns()} {os.getpid()}\n")

    def nap_end(self, number: int) -> None:
        """Log that job `number` ended."""
        self._log(f"end {number} {time.monotonic_ns()} {os.getpid()}\n")

    async def nap(self, number: int) -> None:
        """The 50 ms job of the kill scenario, for async handlers."""
        self.nap_begin(number)
        await asyncio.sleep(NAP_S)
        self.nap_end(number)

    def nap_blocking(self, number: int) -> None:
        """The 50 ms job of the kill scenario, for handlers in threads or processes."""
        self.nap_begin(number)
        time.sleep(NAP_S)
        self.nap_end(number)

    def _log(self, line: str) -> None:
        if self._log_fd < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._log_fd = os.open(self.path.with_suffix(".log"), flags, 0o644)
        os.write(self._log_fd, line.encode())

    def _finish(self, count: int) -> None:
        told = {
            **self._first,
            "last_ns": time.monotonic_ns(),
            "cpu_last_ns": time.process_time_ns(),
            "count": count,
            "pid": os.getpid(),
            "waits_ns": self._waits_ns,
        }
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(told))
        draft.replace(self.path)


probe = Probe()

Answer = dict[str, Any]
Maybe = Awaitable[Any] | Any


class Producer(Protocol):
    """The queue-specific half of an adapter. Methods may be plain or async.

    `submit` puts one job in the way the library's guide shows. `submit_bulk` uses the library's own
    batch call; leave it out when there is none. `unfinished` counts the jobs that the store still
    holds as waiting or running: 0 means that every effect of every job has been written.
    """

    notes: str
    packages: tuple[str, ...]

    def worker(self, concurrency: int | None) -> list[str]: ...
    def submit(self, task: str, argument: int) -> Maybe: ...
    def unfinished(self) -> Maybe: ...


def redis_url() -> str:
    """The private server of this run, over TCP, database 0."""
    return os.environ["BENCH_REDIS_URL"]


def redis_port() -> int:
    """The TCP port of the private server."""
    return int(os.environ["BENCH_REDIS_PORT"])


def serve(make: Callable[[], Producer | Coroutine[Any, Any, Producer]]) -> None:
    """Answer the harness until it says stop or closes our stdin."""
    use_uvloop()
    asyncio.run(_serve(make))


def use_uvloop() -> None:
    """Give every loop made from now on uvloop's speed, where the peer's environment has it."""
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


async def _serve(make: Callable[[], Producer | Coroutine[Any, Any, Producer]]) -> None:
    # A library that prints must not break the protocol: stdout becomes stderr for everybody else.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    producer: Producer = await _settled(make())
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        operation = request.pop("op")
        if operation == "stop":
            answers.write('{"ok": true}\n')
            break
        try:
            answer = await _answer(producer, operation, request)
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    # Client libraries like to wait for idle threads and pools here; the run is over.
    os._exit(0)


async def _answer(producer: Producer, operation: str, request: dict[str, Any]) -> Answer:
    match operation:
        case "prepare":
            return _prepare(producer, request["concurrency"])
        case "enqueue":
            return await _enqueue(producer, request["task"], request["count"], request["mode"])
        case "pace":
            return await _pace(producer, request["rate"], request["seconds"])
        case "unfinished":
            return {"ok": True, "unfinished": await _settled(producer.unfinished())}
    extra = getattr(producer, operation, None)
    if extra is None:
        return {"ok": False, "error": f"this adapter has no operation {operation!r}"}
    return {"ok": True, **await _settled(extra(**request))}


def _prepare(producer: Producer, concurrency: int | None) -> Answer:
    from importlib.metadata import version

    modes = ["single"]
    if inspect.iscoroutinefunction(producer.submit):
        modes.append("concurrent")
    if hasattr(producer, "submit_bulk"):
        modes.append("bulk")
    return {
        "ok": True,
        "versions": {name: version(name) for name in producer.packages},
        "python": sys.version.split()[0],
        "notes": producer.notes,
        "modes": modes,
        "worker": producer.worker(concurrency),
    }


async def _enqueue(producer: Producer, task: str, count: int, mode: str) -> Answer:
    began, cpu_began = time.perf_counter(), time.process_time()
    match mode:
        case "single":
            await _one_by_one(producer, task, range(count))
        case "concurrent":
            numbers = iter(range(count))
            await asyncio.gather(*(_one_by_one(producer, task, numbers) for _ in range(IN_FLIGHT)))
        case "bulk":
            await _settled(producer.submit_bulk(task, range(count)))  # type: ignore[attr-defined]
        case _:
            return {"ok": False, "error": f"no enqueue mode {mode!r}: single, concurrent or bulk"}
    return {
        "ok": True,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
    }


async def _one_by_one(producer: Producer, task: str, numbers: Iterable[int]) -> None:
    if inspect.iscoroutinefunction(producer.submit):
        for number in numbers:
            await producer.submit(task, number)
    else:
        for number in numbers:
            producer.submit(task, number)


async def _pace(producer: Producer, rate: int, seconds: float) -> Answer:
    """Open loop: job n is due at n / rate, whatever became of the ones before it."""
    count = int(rate * seconds)
    began = time.monotonic()
    for number in range(count):
        ahead = began + number / rate - time.monotonic()
        if ahead > 0:
            await asyncio.sleep(ahead)
        await _settled(producer.submit("stamp", time.monotonic_ns()))
    return {"ok": True, "count": count, "seconds": time.monotonic() - began}


async def _settled(value: Maybe) -> Any:
    return await value if inspect.isawaitable(value) else value
