"""The child process that runs `process=True` handlers, one call at a time.

It is started as a fresh interpreter and imports the handler's module, so nothing of the worker's
memory is shared and a kill harms nobody. It ends when the worker's end of the socket closes,
however the worker died. Signals from a terminal or a service manager are the worker's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from tenure.core.errors import LeaseLost, StoreError
from tenure.core.lease import Report
from tenure.core.outcome import Outcome
from tenure.core.retry import judge
from tenure.worker import frames
from tenure.worker.holding import Held
from tenure.worker.job import WRITTEN, Job, current_job
from tenure.worker.outcomes import completed
from tenure.worker.task import Handler, Task, is_child

_MAIN_ALIAS = "__tenure_main__"


def main(fd: int) -> None:
    """Serve calls from the socket `fd` until it closes."""
    is_child.set()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN, which programs started by the handler would inherit.
        signal.signal(number, lambda *_: None)
    wire = _Wire(socket.socket(fileno=fd))
    while True:
        call = wire.inbox.get()
        if isinstance(call, frames.Call):
            outcome = _live(call, wire)
            ended = (outcome.kind, outcome.result, outcome.failure, outcome.delay_ms)
            wire.send(frames.Ended(*ended, outcome.until))


class _Wire:
    """Both directions of the socket; a thread reads, so that the worker's end is noticed."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.inbox: queue.SimpleQueue[frames.ToChild] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: frames.FromChild) -> None:
        self._socket.sendall(frames.framed(message))

    def report(self, held: Held, report: Report) -> Awaitable[None]:
        self.send(frames.News(msgspec.structs.replace(report, lease=held.lease)))
        answer = self.inbox.get()
        if isinstance(answer, frames.Written) and answer.lost:
            raise LeaseLost(held.lease.job_id, answer.lost)
        if isinstance(answer, frames.Written) and answer.refused:
            raise StoreError(answer.refused, operation="report")
        return WRITTEN

    def _listen(self) -> None:
        stream = self._socket.makefile("rb")
        while header := stream.read(frames.HEADER.size):
            (size,) = frames.HEADER.unpack(header)
            self.inbox.put(frames.read_to_child(stream.read(size)))
        os._exit(0)  # the worker is gone, and with it the lease


def _live(call: frames.Call, wire: _Wire) -> Outcome:
    held = Held(call.lease, float("inf"), time.monotonic())
    job = Job(held, wire.report, call.worker_id, call.timeout_s)
    current_job.set(job)
    try:
        handler = find_handler(*call.where)
        wire.send(frames.Begun())
        held.started = time.monotonic()
        value: Any = handler(job)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return completed(call.lease, value, partial(_say, wire, held))
    except LeaseLost:
        return Outcome(call.lease, "release")  # the worker knows already and writes nothing
    except BaseException as error:
        return judge(call.lease, error, call.retry, call.chance)


def _say(wire: _Wire, held: Held, news: Report) -> None:
    with contextlib.suppress(StoreError):  # a line of the log is no reason to fail the job
        wire.report(held, news)


def find_handler(module: str, file: str, qualname: str) -> Handler:
    """Import the handler's module by name, or by file if the name leads elsewhere."""
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
