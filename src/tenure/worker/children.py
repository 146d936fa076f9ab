"""The worker's side of its child processes: a pool whose members can be killed at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from tenure.core.errors import LeaseLost, TenureError
from tenure.core.outcome import Outcome
from tenure.worker import frames
from tenure.worker.child import main
from tenure.worker.holding import Attempt
from tenure.worker.outcomes import ProcessDied
from tenure.worker.task import Task

_START = f"import sys; sys.path[:] = {{path!r}}; from {main.__module__} import main; main({{fd}})"


class Child:
    """One process. It leads a session of its own, so a kill takes along all that it started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls) -> Child:
        """A fresh interpreter with the worker's import path."""
        ours, theirs = socket.socketpair()
        code = _START.format(path=sys.path, fd=theirs.fileno())
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 # nosec B603 # a vfork of a known program
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        made = cls(process)
        made._reader, made._writer = await asyncio.open_unix_connection(sock=ours)
        return made

    @property
    def usable(self) -> bool:
        """It lives and waits for a call."""
        return self._process.poll() is None and not self._reader.at_eof()

    def kill(self) -> None:
        """End it and its own children now, whatever they are doing."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)  # no zombie stays

    async def reap(self) -> int:
        """Wait until it is gone; its exit code."""
        return await asyncio.to_thread(self._process.wait)

    def send(self, message: frames.ToChild) -> None:
        """Hand it a message."""
        self._writer.write(frames.framed(message))

    async def receive(self) -> frames.FromChild:
        """Its next message; raises `ProcessDied` when it is gone."""
        try:
            header = await self._reader.readexactly(frames.HEADER.size)
            body = await self._reader.readexactly(frames.HEADER.unpack(header)[0])
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self.reap()
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise ProcessDied(f"the handler's process ended {how}") from None
        message: frames.FromChild = frames.read_from_child(body)
        return message


class Children:
    """At most `limit` processes, started when needed and used again; further calls wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = asyncio.Semaphore(limit)
        self._idle: list[Child] = []
        self._all: dict[Child, None] = {}
        self._closed = False

    async def call(
        self,
        attempt: Attempt,
        task: Task,
        *,
        worker_id: str,
        chance: float,
        begun: Callable[[Attempt], None],
    ) -> Outcome:
        """Run the handler in a child; when this is cancelled the child is killed."""
        async with self._free:
            child = await self._ready()
            try:
                # `extra` is the contract's own and may be anything; the handler sees its options.
                # They go as JSON, since MessagePack has no integers beyond 64 bits.
                extra = {"opts": json.dumps(attempt.job.opts).encode()}
                lease = msgspec.structs.replace(attempt.held.lease, extra=extra)
                call = (task.where, lease, worker_id, task.timeout_s, task.retry, chance)
                child.send(frames.Call(*call))
                outcome = await _converse(child, attempt, begun)
            except BaseException:
                child.kill()
                self._all.pop(child, None)
                raise
            self._idle.append(child)
            return outcome

    def resize(self, limit: int) -> None:
        """Allow more; with fewer slots there are fewer calls, so nothing is taken away."""
        while self._limit < limit:
            self._limit += 1
            self._free.release()

    def close(self) -> None:
        """Kill them all."""
        for child in self._all:
            child.kill()
        self._all.clear()
        self._idle.clear()

    async def _ready(self) -> Child:
        while self._idle:
            child = self._idle.pop()
            if child.usable:
                return child
            child.kill()
            self._all.pop(child, None)
        child = await Child.start()
        self._all[child] = None
        return child


async def _converse(child: Child, attempt: Attempt, begun: Callable[[Attempt], None]) -> Outcome:
    """Listen to a child until its handler has ended."""
    while True:
        match await child.receive():
            case frames.Begun():
                attempt.held.begun = True
                begun(attempt)
            case frames.News(report):
                news = msgspec.structs.replace(report, lease=attempt.held.lease)
                try:
                    await attempt.source.report(attempt.held, news)
                except LeaseLost as lost:
                    child.send(frames.Written(lost=lost.reason))
                except TenureError as error:
                    child.send(frames.Written(refused=str(error)))
                else:
                    child.send(frames.Written())
            case frames.Ended(kind, result, failure, delay_ms, until):
                return Outcome(attempt.held.lease, kind, result, failure, delay_ms, until)
