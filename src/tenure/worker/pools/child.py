"""The child process of `process=True` handlers, and its messages with the worker.

`main` is the program of the child, `processes` the worker's end of the socket. They exchange
length-prefixed MessagePack.
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
import sys
import threading
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from tenure.core.errors import (
    Conflict,
    InvalidJob,
    LeaseLost,
    QueueFull,
    StoreError,
    TenureError,
    UsageError,
)
from tenure.core.job import Children
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure, Outcome, OutcomeKind, Until
from tenure.core.retry import RetryPolicy, decide_outcome
from tenure.worker.events import Tally
from tenure.worker.job import WRITTEN, AskVerb, Attempt, Job, current_job
from tenure.worker.settle import completed_outcome
from tenure.worker.task import Handler, Task, Where, is_child
from tenure.worker.telemetry import ensure_logs, mark_records

HEADER = struct.Struct("!I")


class Call(msgspec.Struct, frozen=True, tag=True):
    """Run this handler. `queue` is its name in metrics and logs; `jitter` is for a retry delay."""

    where: Where
    lease: Lease
    queue: str
    worker_id: str
    timeout_s: float | None
    retry: RetryPolicy | None
    jitter: float
    opts: bytes


class Written(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Reported`; if it was not written, `lost` or `refused` says why."""

    lost: str = ""
    refused: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the lifespan and end."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The handler is imported and starts now: its timeout runs from here."""


class Reported(msgspec.Struct, frozen=True, tag=True):
    """A report of the handler."""

    report: Report


class Asked(msgspec.Struct, frozen=True, tag=True):
    """What the handler asks of the queue; see `Job`."""

    verb: AskVerb
    argument: bytes


class Answered(msgspec.Struct, frozen=True, tag=True):
    """The answer to an `Asked`, as JSON, or the name and text of the error to raise."""

    value: bytes = b"null"
    error: str = ""
    text: str = ""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The outcome, decided in the child, where the exception is."""

    kind: OutcomeKind
    result: bytes
    failure: Failure | None
    delay_ms: int
    until: Until = ""


ToChild = Call | Written | Answered | Stop
FromChild = Begun | Reported | Asked | Ended

_encoder = msgspec.msgpack.Encoder()
_read_to_child = msgspec.msgpack.Decoder(ToChild).decode
read_from_child = msgspec.msgpack.Decoder(FromChild).decode


# The errors that a submit raises; others come as a `StoreError`.
_RAISED: dict[str, type[TenureError]] = {
    each.__name__: each for each in (Conflict, InvalidJob, QueueFull, UsageError)
}


def framed(message: ToChild | FromChild) -> bytes:
    """The bytes of one message."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


_MAIN_ALIAS = "__tenure_main__"


def main(fd: int, lifespan: Where | None, logs: dict[str, Any]) -> None:
    """The child process: serve calls from the socket `fd`, one at a time, until it closes.

    It is a fresh interpreter that imports the handler's module: it shares no memory with the worker
    and can be killed. It ends when the worker's end of the socket closes, however the worker died.
    It ignores SIGINT and SIGTERM, which the worker handles. With a `lifespan` it enters that before
    its first handler, and leaves it when the worker stops; all of it runs in one event loop.
    """
    is_child.set()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN, which programs started by the handler would inherit.
        signal.signal(number, lambda *_: None)
    wire = _Wire(socket.socket(fileno=fd))
    with _Environment(lifespan, logs) as environment:
        while not isinstance(call := wire.messages.get(), Stop):
            if isinstance(call, Call):
                outcome = _run_handler(call, wire, environment)
                ended = (outcome.kind, outcome.result, outcome.failure, outcome.delay_ms)
                wire.send(Ended(*ended, outcome.until))


class _Environment:
    """What the handlers of one child share: logs, the event loop and the value of the lifespan."""

    def __init__(self, lifespan: Where | None, logs: dict[str, Any]) -> None:
        self._lifespan = lifespan
        self._logs = logs
        self._entered: Any = None
        self._runner = asyncio.Runner()
        self.state: Any = None

    def __enter__(self) -> _Environment:
        return self

    def __exit__(self, *_: object) -> None:
        if self._entered is not None:
            self._runner.run(self._entered.__aexit__(None, None, None))
        self._runner.close()

    def prepare(self) -> None:
        """Before the first handler, when its module is imported and may have set up logging."""
        ensure_logs(**self._logs)
        mark_records()
        if self._lifespan is not None and self._entered is None:
            opened = _find(*self._lifespan)()
            self.state = self._runner.run(opened.__aenter__())
            self._entered = opened

    def run(self, call: Any) -> Any:
        """The value of a coroutine; without a lifespan in a loop of its own."""
        if self._lifespan is None:
            return asyncio.run(call)
        return self._runner.run(call, context=contextvars.copy_context())


class _Wire:
    """Both directions of the socket; a thread reads, to notice the end of the worker."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.messages: queue.SimpleQueue[ToChild] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: FromChild) -> None:
        self._socket.sendall(framed(message))

    def report(self, attempt: Attempt, report: Report) -> Awaitable[None]:
        self.send(Reported(msgspec.structs.replace(report, lease=attempt.lease)))
        answer = self.messages.get()
        if isinstance(answer, Written) and answer.lost:
            raise LeaseLost(attempt.lease.job_id, answer.lost)
        if isinstance(answer, Written) and answer.refused:
            raise StoreError(answer.refused, operation="report")
        return WRITTEN

    async def ask(self, attempt: Attempt, verb: AskVerb, argument: bytes) -> Any:
        self.send(Asked(verb, argument))
        answer = self.messages.get()
        if not isinstance(answer, Answered):
            raise StoreError("the worker gave no answer", operation=verb)
        if answer.error:
            raise _RAISED.get(answer.error, StoreError)(answer.text)
        kind = Children if verb == "children" else str
        return msgspec.json.decode(answer.value, type=kind)

    def _listen(self) -> None:
        stream = self._socket.makefile("rb")
        while header := stream.read(HEADER.size):
            (size,) = HEADER.unpack(header)
            self.messages.put(_read_to_child(stream.read(size)))
        os._exit(0)  # the worker is gone, and with it the lease


def _run_handler(call: Call, wire: _Wire, environment: _Environment) -> Outcome:
    tally = Tally(call.queue, call.lease.task)
    attempt = Attempt(call.lease, float("inf"), time.monotonic(), tally=tally)
    opts = json.loads(call.opts)
    job = Job(attempt, wire.report, call.worker_id, call.timeout_s, wire.ask, _opts=opts)
    current_job.set(job)
    try:
        handler = _find_handler(*call.where)
        environment.prepare()
        job._state = environment.state
        wire.send(Begun())
        attempt.started = time.monotonic()
        value: Any = handler(job)
        if inspect.iscoroutine(value):
            value = environment.run(value)
        return completed_outcome(call.lease, value, partial(_log_line, wire, attempt))
    except LeaseLost:
        return Outcome(call.lease, "release")  # the worker knows and writes nothing
    except BaseException as error:
        return decide_outcome(call.lease, error, call.retry, call.jitter)


def _log_line(wire: _Wire, attempt: Attempt, report: Report) -> None:
    with contextlib.suppress(StoreError):  # a log line that is not written must not fail the job
        wire.report(attempt, report)


def _find_handler(module: str, file: str, qualname: str) -> Handler:
    found = _find(module, file, qualname)
    handler: Handler = found.run if isinstance(found, Task) else found
    return handler


def _find(module: str, file: str, qualname: str) -> Any:
    """Import a module by name, or by file if the name is another module's; what it holds."""
    found: Any = _module(module, file)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


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
