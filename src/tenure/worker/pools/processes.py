"""Child processes that run handlers: started when needed, reused, killed when they must stop."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from tenure.core.errors import LeaseLost, TenureError
from tenure.core.outcome import Outcome
from tenure.core.process import popen, signal_group
from tenure.worker.job import AskVerb, Attempt
from tenure.worker.plans import ask
from tenure.worker.pools.child import (
    HEADER,
    Answered,
    Asked,
    Begun,
    Call,
    Ended,
    FromChild,
    Reported,
    Stop,
    ToChild,
    Written,
    framed,
    main,
    read_from_child,
)
from tenure.worker.settle import ProcessDied
from tenure.worker.task import Task, Where
from tenure.worker.telemetry import log_options

_START = (
    f"import sys; sys.path[:] = {{path!r}}; from {main.__module__} import main; "
    "main({fd}, {lifespan!r}, {logs!r})"
)


class _Child:
    """One process, in its own session, so that a kill ends all that it started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, lifespan: Where | None) -> _Child:
        """A fresh interpreter with the worker's import path."""
        ours, theirs = socket.socketpair()
        given = {"lifespan": lifespan, "logs": log_options()}
        code = _START.format(path=sys.path, fd=theirs.fileno(), **given)
        with theirs:
            process = popen([sys.executable, "-P", "-c", code], keep_open=[theirs.fileno()])
        made = cls(process)
        made._reader, made._writer = await asyncio.open_unix_connection(sock=ours)
        return made

    @property
    def usable(self) -> bool:
        """Whether it runs and waits for a call."""
        return self._process.poll() is None and not self._reader.at_eof()

    def kill(self) -> None:
        """Kill it and its own children."""
        signal_group(self._process.pid, signal.SIGKILL)
        self._writer.close()
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)  # reap it

    async def reap(self) -> int:
        """Wait until it has ended; its exit code."""
        return await asyncio.to_thread(self._process.wait)

    def send(self, message: ToChild) -> None:
        """Send it a message."""
        self._writer.write(framed(message))

    async def receive(self) -> FromChild:
        """Its next message; raises `ProcessDied` if it has ended."""
        try:
            header = await self._reader.readexactly(HEADER.size)
            body = await self._reader.readexactly(HEADER.unpack(header)[0])
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self.reap()
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise ProcessDied(f"the handler's process ended {how}") from None
        message: FromChild = read_from_child(body)
        return message


class ProcessPool:
    """At most `limit` processes, started when needed and reused; further calls wait."""

    def __init__(self, limit: int, lifespan: Where | None) -> None:
        self._limit = limit
        self._lifespan = lifespan
        self._free = asyncio.Semaphore(limit)
        self._idle: list[_Child] = []
        self._all: dict[_Child, None] = {}

    async def call(
        self,
        attempt: Attempt,
        task: Task,
        worker_id: str,
        jitter: float,
        on_start: Callable[[Attempt], None],
    ) -> Outcome:
        """Run the handler in a child; cancelling this kills the child."""
        async with self._free:
            child = await self._ready()
            try:
                # `extra` is private to the queue and may be anything. The options go as JSON, since
                # MessagePack has no integers beyond 64 bits.
                lease = msgspec.structs.replace(attempt.lease, extra=None)
                opts = json.dumps(attempt.job.opts).encode()
                whose = (task.where, lease, attempt.tally.queue, worker_id)
                child.send(Call(*whose, task.timeout_s, task.retry, jitter, opts))
                outcome = await _follow_child(child, attempt, on_start)
            except BaseException:
                self._discard(child)
                raise
            self._idle.append(child)
            return outcome

    def resize(self, limit: int) -> None:
        """Allow more processes. A lower limit needs no action: fewer slots make fewer calls."""
        while self._limit < limit:
            self._limit += 1
            self._free.release()

    async def close(self, grace_s: float) -> None:
        """Kill them all; idle ones that have a lifespan may leave it first."""
        leaving = [each for each in self._idle if each.usable] if self._lifespan else []
        for child in leaving:
            child.send(Stop())
        if leaving:
            ends = [asyncio.ensure_future(child.reap()) for child in leaving]
            await asyncio.wait(ends, timeout=grace_s)
        for child in self._all:
            child.kill()
        self._all.clear()
        self._idle.clear()

    async def _ready(self) -> _Child:
        while self._idle:
            child = self._idle.pop()
            if child.usable:
                return child
            self._discard(child)
        child = await _Child.start(self._lifespan)
        self._all[child] = None
        return child

    def _discard(self, child: _Child) -> None:
        child.kill()
        self._all.pop(child, None)


async def _follow_child(
    child: _Child, attempt: Attempt, on_start: Callable[[Attempt], None]
) -> Outcome:
    """Handle the messages of a child until its handler has ended."""
    while True:
        match await child.receive():
            case Begun():
                attempt.handler_started = True
                on_start(attempt)
            case Reported(report):
                report = msgspec.structs.replace(report, lease=attempt.lease)
                try:
                    await attempt.source.report(attempt, report)
                except LeaseLost as lost:
                    child.send(Written(lost=lost.reason))
                except TenureError as error:
                    child.send(Written(refused=str(error)))
                else:
                    child.send(Written())
            case Asked(verb, argument):
                child.send(await _answered(attempt, verb, argument))
            case Ended(kind, result, failure, delay_ms, until):
                return Outcome(attempt.lease, kind, result, failure, delay_ms, until)


async def _answered(attempt: Attempt, verb: AskVerb, argument: bytes) -> Answered:
    try:
        return Answered(msgspec.json.encode(await ask(attempt, verb, argument)))
    except Exception as error:
        return Answered(error=type(error).__name__, text=str(error))
