"""A handler with its name and how to run it, and the registry a worker looks handlers up in."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Unpack

import msgspec

from tenure.core.convert import payload_of
from tenure.core.errors import UsageError
from tenure.core.job import Schedule
from tenure.core.portable import SubmitOptions
from tenure.core.retry import RetryPolicy
from tenure.worker.parameters import Parameters

if TYPE_CHECKING:  # a plain `Task` is one of any parameters and any result
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R = TypeVar("R", default=Any)
else:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")

Kind = Literal["async", "thread", "process"]
Handler = Callable[..., Any]
BackoffFunction = Callable[[int, str, BaseException, Any], int]

ANY_TASK = "*"

is_child = threading.Event()
"""Set in a child process that runs `process=True` handlers. It imports the application's modules; a
worker that one of them starts at import time must not start there."""


@dataclass(frozen=True, slots=True)
class Task(Generic[P, R]):
    """A handler with its name and how to run it. Calling it calls the handler, as in a test.

    `P` are the parameters that come from the payload, `R` is the type of the result. `run` takes
    the job: of a typed handler it reads the payload first, any other handler it is.
    """

    name: str
    handler: Handler
    kind: Kind
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    where: tuple[str, str, str] = field(default=("", "", ""))
    backoff: BackoffFunction | None = None
    parameters: Parameters | None = field(default=None, repr=False, compare=False)
    schedule: Schedule | None = field(default=None, repr=False, compare=False)
    run: Handler = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        run = self.handler
        if self.parameters is not None:
            run = partial(_run_typed, self.handler, self.parameters)
        object.__setattr__(self, "run", run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.handler(*args, **kwargs)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call of this task, to be submitted with options or with others.

        Raises `InvalidJob` for arguments that the handler would not take. A handler that takes the
        job itself is called with one value, or with fields by name: its payload.
        """
        if self.parameters is not None:
            return Call(self, self.parameters.write(args, kwargs))
        if len(args) > 1 or (args and kwargs):
            raise UsageError(
                f"task {self.name!r} takes one payload, a value or fields by name; its handler "
                "declares no parameters"
            )
        return Call(self, payload_of(args[0] if args else kwargs, self.name))

    @property
    def result_type(self) -> Any:
        """The type of the result that the handler declares; `Any` where it declares none."""
        return self.parameters.result if self.parameters is not None else Any


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """A task with its payload, JSON that the task has checked, and options of the submit."""

    task: Task[..., R]
    payload: bytes
    options: SubmitOptions = field(default_factory=SubmitOptions)

    def with_options(self, **options: Unpack[SubmitOptions]) -> Call[R]:
        """The same call, to be submitted with these options."""
        return replace(self, options={**self.options, **options})


def _run_typed(handler: Handler, parameters: Parameters, job: Any) -> Any:
    """Read the payload and call the handler; what it raises before that is `Fatal`."""
    given = parameters.read(job.lease.payload)
    if parameters.job:
        given[parameters.job] = job
    return handler(**given)


class Tasks:
    """The handlers of one worker by name, and the schedules that they declare."""

    __slots__ = ("_by_name", "_fallback", "schedules")

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._by_name: dict[str, Task] = {}
        for each in tasks:
            if not isinstance(each, Task):
                raise UsageError(f"{each!r} is not a task; decorate it with @task(name)")
            if each.name in self._by_name:
                raise UsageError(f"task {each.name!r} has two handlers; one must go")
            if each.parameters is not None:
                each.parameters.check()
            self._by_name[each.name] = each
        if not self._by_name:
            raise UsageError("a worker needs at least one task")
        self._fallback = self._by_name.get(ANY_TASK)
        self.schedules = [_declared(each, each.schedule) for each in self if each.schedule]

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

    def __iter__(self) -> Iterator[Task]:
        return iter(self._by_name.values())


def _declared(task: Task, schedule: Schedule) -> Schedule:
    """A declared schedule, with the payload of a call without arguments."""
    payload = task.call().payload.decode()
    template = msgspec.structs.replace(schedule.template, payload=payload)
    return msgspec.structs.replace(schedule, template=template)
