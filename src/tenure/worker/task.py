"""Handlers and their names: the `task` decorator, and the registry of a worker."""

from __future__ import annotations

import difflib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from tenure.core.errors import UsageError
from tenure.core.retry import RetryPolicy

Kind = Literal["async", "thread", "process"]
Handler = Callable[..., Any]
BackoffFunction = Callable[[int, str, BaseException, Any], int]

ANY_TASK = "*"

is_child = threading.Event()
"""Set in a child process that runs `process=True` handlers. It imports the application's modules; a
worker that one of them starts at import time must not start there."""


@dataclass(frozen=True, slots=True)
class Task:
    """A handler with its name and how to run it. Calling it calls the handler, as in a test."""

    name: str
    handler: Handler
    kind: Kind
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    where: tuple[str, str, str] = field(default=("", "", ""))
    backoff: BackoffFunction | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.handler(*args, **kwargs)


def task(
    name: str,
    *,
    timeout_s: float | None = None,
    retry: RetryPolicy | None = None,
    process: bool = False,
    backoff: BackoffFunction | None = None,
) -> Callable[[Handler], Task]:
    """Make a function the handler of the jobs called `name` ("*": of all that have no other).

    `async def` runs in the worker's loop, `def` in a thread, and with `process=True` either runs in
    a child process, the only kind that can be stopped by force. After `timeout_s` the attempt fails
    with the code "timeout". Without `retry` the job's own options in the store decide whether a
    failure is tried again. If those name a backoff that the queue does not know, `backoff` is
    called with the attempts made, the name, the error and the job; it returns ms, or -1 to give the
    job up.
    """
    if not name:
        raise UsageError('a task needs a name, as in @task("video-generation")')
    if timeout_s is not None and timeout_s <= 0:
        raise UsageError(f"task {name!r}: timeout_s is more than 0, not {timeout_s}")

    def decorate(handler: Handler) -> Task:
        if isinstance(handler, Task):
            handler = handler.handler
        is_async = inspect.iscoroutinefunction(handler)
        kind: Kind = "process" if process else "async" if is_async else "thread"
        where = _where(handler, name, kind)
        return Task(name, handler, kind, timeout_s, retry, where, backoff)

    return decorate


def _where(handler: Handler, name: str, kind: Kind) -> tuple[str, str, str]:
    """Module, file and qualified name: how a child process finds the handler again."""
    qualname = getattr(handler, "__qualname__", "")
    if kind == "process" and (not qualname or "<" in qualname):
        raise UsageError(
            f"task {name!r}: a process handler must be importable, so define it at the top of a "
            f"module (this one is {qualname or handler!r})"
        )
    code = getattr(handler, "__code__", None)
    return _module_name(handler), code.co_filename if code else "", qualname


def _module_name(handler: Handler) -> str:
    """The module's name; for `__main__` started by `python -m` its importable name."""
    name = handler.__module__
    spec = getattr(sys.modules.get(name), "__spec__", None) if name == "__main__" else None
    return spec.name if spec is not None else name


class Tasks:
    """The handlers of one worker by name."""

    __slots__ = ("_by_name", "_fallback")

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._by_name: dict[str, Task] = {}
        for each in tasks:
            if not isinstance(each, Task):
                raise UsageError(f"{each!r} is not a task; decorate it with @task(name)")
            if each.name in self._by_name:
                raise UsageError(f"task {each.name!r} has two handlers; one must go")
            self._by_name[each.name] = each
        if not self._by_name:
            raise UsageError("a worker needs at least one task")
        self._fallback = self._by_name.get(ANY_TASK)

    def find(self, name: str) -> Task | None:
        """The handler for this task name, else the one for "*", else None."""
        return self._by_name.get(name, self._fallback)

    def close(self, name: str) -> str:
        """The registered name that is most like this one; "" when none is."""
        return next(iter(difflib.get_close_matches(name, self._by_name, n=1)), "")

    def nearest(self, name: str) -> str:
        """A message for an unknown task: the registered tasks, and the closest one."""
        close = self.close(name)
        hint = f", did you mean {close!r}?" if close else ""
        return f"no handler for task {name!r}{hint} (there are: {', '.join(self._by_name)})"

    @property
    def kinds(self) -> set[str]:
        """Which kinds of handlers there are."""
        return {each.kind for each in self._by_name.values()}

    def __iter__(self) -> Any:
        return iter(self._by_name.values())
