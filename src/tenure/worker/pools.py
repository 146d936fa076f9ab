"""Handlers outside of the event loop: a pool of threads and a pool of child processes.

Both ends of the socket between worker and child are here: `_ProcessPool` is the worker's, `main`
the child's. They exchange length-prefixed MessagePack.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib.util
import inspect
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import msgspec

from tenure.core.errors import LeaseLost, StoreError, TenureError
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure, Outcome, OutcomeKind, Until
from tenure.core.process import popen, signal_group
from tenure.core.retry import RetryPolicy, decide_outcome
from tenure.worker.config import Capacity
from tenure.worker.job import WRITTEN, Attempt, Job, current_job
from tenure.worker.settle import ProcessDied, completed_outcome
from tenure.worker.task import Handler, Task, is_child

_ThreadCall = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]


class _ThreadPool:
    """At most `limit` calls at once; further ones wait in order.

    `concurrent.futures` is not used because it joins its threads when the interpreter ends: a
    handler that never returns would keep a stopped worker alive.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._calls: queue.SimpleQueue[_ThreadCall | None] = queue.SimpleQueue()
        self._count = 0
        self._busy = 0  # calls without an answer; only the loop's thread writes it

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run it in a thread; returns what it returns, raises what it raises.

        If the caller is cancelled the thread goes on: nothing can stop it.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._busy += 1
        done.add_done_callback(self._back)
        if self._busy > self._count and self._count < self.limit:
            self._count += 1
            name = f"tenure-handler-{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._calls.put((function, done, loop))
        return await done

    def close(self) -> None:
        """Idle threads end; busy ones end after their call."""
        for _ in range(self._count):
            self._calls.put(None)

    def _back(self, _: asyncio.Future[Any]) -> None:
        self._busy -= 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, done, loop = call
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(_deliver, done, value, error)
            except RuntimeError:
                return  # the loop is closed: the worker has stopped
            del call, function, done, value, error


def _deliver(done: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(value)
    elif isinstance(error, StopIteration):  # a future cannot carry it
        done.set_exception(RuntimeError(f"the handler raised {error!r}"))
    else:
        done.set_exception(error)


_HEADER = struct.Struct("!I")


class _Call(msgspec.Struct, frozen=True, tag=True):
    """Run this handler. `where` is module, file and qualified name, `jitter` for a retry delay."""

    where: tuple[str, str, str]
    lease: Lease
    worker_id: str
    timeout_s: float | None
    retry: RetryPolicy | None
    jitter: float
    opts: bytes


class _Written(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `_Reported`; if it was not written, `lost` or `refused` says why."""

    lost: str = ""
    refused: str = ""


class _Begun(msgspec.Struct, frozen=True, tag=True):
    """The handler is imported and starts now: its timeout runs from here."""


class _Reported(msgspec.Struct, frozen=True, tag=True):
    """A report of the handler."""

    report: Report


class _Ended(msgspec.Struct, frozen=True, tag=True):
    """The outcome, decided in the child, where the exception is."""

    kind: OutcomeKind
    result: bytes
    failure: Failure | None
    delay_ms: int
    until: Until = ""


_ToChild = _Call | _Written
_FromChild = _Begun | _Reported | _Ended

_encoder = msgspec.msgpack.Encoder()
_read_to_child = msgspec.msgpack.Decoder(_ToChild).decode
_read_from_child = msgspec.msgpack.Decoder(_FromChild).decode


def _framed(message: _ToChild | _FromChild) -> bytes:
    """The bytes of one message."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


_MAIN_ALIAS = "__tenure_main__"


def main(fd: int) -> None:
    """The child process: serve calls from the socket `fd`, one at a time, until it closes.

    It is a fresh interpreter that imports the handler's module: it shares no memory with the worker
    and can be killed. It ends when the worker's end of the socket closes, however the worker died.
    It ignores SIGINT and SIGTERM, which the worker handles.
    """
    is_child.set()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN, which programs started by the handler would inherit.
        signal.signal(number, lambda *_: None)
    wire = _Wire(socket.socket(fileno=fd))
    while True:
        call = wire.messages.get()
        if isinstance(call, _Call):
            outcome = _run_handler(call, wire)
            ended = (outcome.kind, outcome.result, outcome.failure, outcome.delay_ms)
            wire.send(_Ended(*ended, outcome.until))


class _Wire:
    """Both directions of the socket; a thread reads, to notice the end of the worker."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.messages: queue.SimpleQueue[_ToChild] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: _FromChild) -> None:
        self._socket.sendall(_framed(message))

    def report(self, attempt: Attempt, report: Report) -> Awaitable[None]:
        self.send(_Reported(msgspec.structs.replace(report, lease=attempt.lease)))
        answer = self.messages.get()
        if isinstance(answer, _Written) and answer.lost:
            raise LeaseLost(attempt.lease.job_id, answer.lost)
        if isinstance(answer, _Written) and answer.refused:
            raise StoreError(answer.refused, operation="report")
        return WRITTEN

    def _listen(self) -> None:
        stream = self._socket.makefile("rb")
        while header := stream.read(_HEADER.size):
            (size,) = _HEADER.unpack(header)
            self.messages.put(_read_to_child(stream.read(size)))
        os._exit(0)  # the worker is gone, and with it the lease


def _run_handler(call: _Call, wire: _Wire) -> Outcome:
    attempt = Attempt(call.lease, float("inf"), time.monotonic())
    job = Job(attempt, wire.report, call.worker_id, call.timeout_s, _opts=json.loads(call.opts))
    current_job.set(job)
    try:
        handler = _find_handler(*call.where)
        wire.send(_Begun())
        attempt.started = time.monotonic()
        value: Any = handler(job)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return completed_outcome(call.lease, value, partial(_log_line, wire, attempt))
    except LeaseLost:
        return Outcome(call.lease, "release")  # the worker knows and writes nothing
    except BaseException as error:
        return decide_outcome(call.lease, error, call.retry, call.jitter)


def _log_line(wire: _Wire, attempt: Attempt, report: Report) -> None:
    with contextlib.suppress(StoreError):  # a log line that is not written must not fail the job
        wire.report(attempt, report)


def _find_handler(module: str, file: str, qualname: str) -> Handler:
    """Import the handler's module by name, or by file if the name is another module's."""
    found: Any = _module(module, file)
    for part in qualname.split("."):
        found = getattr(found, part)
    handler: Handler = found.handler if isinstance(found, Task) else found
    return handler


def _module(name: str, file: str) -> ModuleType:
    if name in ("__main__", "__mp_main__"):
        name = _MAIN_ALIAS  # so that its `if __name__ == "__main__"` does not run here
    elif importlib.util.find_spec(name.partition(".")[0]) is not None:
        loaded = importlib.import_module(name)
        if not file or Path(loaded.__file__ or "").resolve() == Path(file).resolve():
            return loaded
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"a child process cannot import module {name!r} from {file!r}")
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


_START = f"import sys; sys.path[:] = {{path!r}}; from {main.__module__} import main; main({{fd}})"


class _Child:
    """One process, in its own session, so that a kill ends all that it started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls) -> _Child:
        """A fresh interpreter with the worker's import path."""
        ours, theirs = socket.socketpair()
        code = _START.format(path=sys.path, fd=theirs.fileno())
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

    def send(self, message: _ToChild) -> None:
        """Send it a message."""
        self._writer.write(_framed(message))

    async def receive(self) -> _FromChild:
        """Its next message; raises `ProcessDied` if it has ended."""
        try:
            header = await self._reader.readexactly(_HEADER.size)
            body = await self._reader.readexactly(_HEADER.unpack(header)[0])
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self.reap()
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise ProcessDied(f"the handler's process ended {how}") from None
        message: _FromChild = _read_from_child(body)
        return message


class _ProcessPool:
    """At most `limit` processes, started when needed and reused; further calls wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
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
                call = (task.where, lease, worker_id, task.timeout_s, task.retry, jitter, opts)
                child.send(_Call(*call))
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

    def close(self) -> None:
        """Kill them all."""
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
        child = await _Child.start()
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
            case _Begun():
                attempt.handler_started = True
                on_start(attempt)
            case _Reported(report):
                report = msgspec.structs.replace(report, lease=attempt.lease)
                try:
                    await attempt.source.report(attempt, report)
                except LeaseLost as lost:
                    child.send(_Written(lost=lost.reason))
                except TenureError as error:
                    child.send(_Written(refused=str(error)))
                else:
                    child.send(_Written())
            case _Ended(kind, result, failure, delay_ms, until):
                return Outcome(attempt.lease, kind, result, failure, delay_ms, until)


class HandlerPools:
    """The threads and child processes of one worker, started when first needed."""

    def __init__(self, capacity: Capacity, *, worker_id: str, rng: Random) -> None:
        self._threads = _ThreadPool(capacity.threads)
        self._processes = _ProcessPool(capacity.processes)
        self._worker_id = worker_id
        self._rng = rng

    def resize(self, capacity: Capacity) -> None:
        """Change the limits."""
        self._threads.limit = capacity.threads
        self._processes.resize(capacity.processes)

    async def run(self, attempt: Attempt, task: Task, on_start: Callable[[Attempt], None]) -> Any:
        """The handler's value (thread) or its outcome (process)."""
        if task.kind == "process":
            jitter = self._rng.random()
            return await self._processes.call(attempt, task, self._worker_id, jitter, on_start)
        return await self._threads.call(_in_thread(attempt, task, on_start))

    def close(self) -> None:
        """Kill the children and end idle threads; a thread in a handler cannot be stopped."""
        self._processes.close()
        self._threads.close()


def report_from_thread(attempt: Attempt, report: Report) -> Awaitable[None]:
    """Hand the report to the worker's loop and wait until it is written."""

    async def written() -> None:
        await attempt.source.report(attempt, report)

    asyncio.run_coroutine_threadsafe(written(), attempt.source.loop).result()
    return WRITTEN


def _in_thread(
    attempt: Attempt, task: Task, on_start: Callable[[Attempt], None]
) -> Callable[[], Any]:
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()
    job = attempt.job

    def call() -> Any:
        # Write `handler_started`, then read `stop_reason`. `Executor.end` does it in the opposite
        # order, so at least one of the two sees the other.
        attempt.handler_started = True
        if attempt.stop_reason:
            return None
        loop.call_soon_threadsafe(on_start, attempt)
        return context.run(task.handler, job)

    return call
