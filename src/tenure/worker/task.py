"""A handler with its name, its parameters and how to run it; the registry of a worker's handlers.

A typed handler reads its parameters from a job's payload:

    async def greet(name: str, loud: bool = False) -> Greeting: ...

A payload for it is `{"name": "Ada"}`. The types are resolved on first use, because a handler may be
decorated before the classes that its annotations name are defined.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Unpack, get_type_hints

import msgspec

from tenure.core.convert import decoder, explain, payload_of
from tenure.core.errors import InvalidJob, UsageError
from tenure.core.job import Schedule
from tenure.core.outcome import Fatal
from tenure.core.portable import SubmitOptions
from tenure.core.retry import RetryPolicy

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
_NAME_CHARS_MAX = 200  # of a job's task, which is compared with those that there are

_EMPTY = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_JOB_TYPES = ("Job", "tenure.Job", "worker.Job", "tenure.worker.Job")
_ANY_TYPES = (_EMPTY, Any, object, "Any", "typing.Any", "object")
_JSON_TYPES = (str, int, float, bool, list, dict, "str", "int", "float", "bool", "list", "dict")

is_child = threading.Event()
"""Set in a child process that runs `process=True` handlers. It imports the application's modules; a
worker that one of them starts at import time must not start there."""


class Parameters:
    """The parameters of one handler that come from the payload. `job` is the one that does not."""

    def __init__(self, handler: Callable[..., Any], task: str, job: str) -> None:
        self._handler = handler
        self._task = task
        self.job = job
        self._signature = inspect.signature(handler)
        self.names = [name for name in self._signature.parameters if name != job]
        for name in self.names:
            kind = self._signature.parameters[name].kind
            if kind in _VARIADIC or kind is inspect.Parameter.POSITIONAL_ONLY:
                raise UsageError(
                    f"task {task!r}: parameter {name!r} cannot come from a payload; a typed "
                    "handler has parameters that can be given by name"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return Parameters, (self._handler, self._task, self.job)  # decoders cannot be pickled

    def read(self, payload: bytes) -> dict[str, Any]:
        """The arguments; raises `Fatal`, because the same payload would fail again."""
        try:
            return self._arguments(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            reason = f"the payload of task {self._task!r}: {explain(error, self.names)}"
            raise Fatal(reason, code="invalid_payload") from None

    def write(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """The payload for a call; raises `InvalidJob` for what the handler would not take."""
        try:
            given = self._call_signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InvalidJob(
                f"task {self._task!r}: {error} (its parameters: {', '.join(self.names) or 'none'}"
                f"{_options_hint(kwargs.keys() - self.names)})"
            ) from None
        payload = payload_of(given, self._task)
        try:
            self._arguments(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidJob(f"task {self._task!r}: {explain(error, self.names)}") from None
        return payload

    @cached_property
    def result(self) -> Any:
        """The declared type of the result; `Any` where none is declared or it is not known here."""
        try:
            return self._hints.get("return", Any)
        except UsageError:
            return Any

    def check(self) -> None:
        """Raise `UsageError` now for annotations that cannot be resolved or read from JSON."""
        _ = self._decode

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(inspect.unwrap(self._handler), include_extras=True)
        except NameError as error:
            raise UsageError(
                f"task {self._task!r}: {error}; the types of a handler's parameters are defined "
                "or imported at the top of its module"
            ) from None

    @cached_property
    def _call_signature(self) -> inspect.Signature:
        given = [self._signature.parameters[name] for name in self.names]
        return self._signature.replace(parameters=given)

    @cached_property
    def _decode(self) -> Callable[[bytes], Any]:
        hints, known = self._hints, self._signature.parameters
        fields = [
            (name, hints.get(name, Any))
            if known[name].default is _EMPTY
            else (name, hints.get(name, Any), msgspec.UNSET)
            for name in self.names
        ]
        try:
            shape = msgspec.defstruct(
                "Payload", fields, kw_only=True, forbid_unknown_fields=True, gc=False
            )
            return decoder(shape)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"task {self._task!r}: its parameters cannot be read from JSON: {error}"
            ) from None

    def _arguments(self, payload: bytes) -> dict[str, Any]:
        given = self._decode(b"{}" if payload == b"null" else payload)
        pairs = ((name, getattr(given, name)) for name in self.names)
        return {name: value for name, value in pairs if value is not msgspec.UNSET}


def _options_hint(unknown: Iterable[str]) -> str:
    """What to do with options of a submit that stand among the parameters."""
    options = sorted(set(unknown) & SubmitOptions.__annotations__.keys())
    if not options:
        return ""
    example = ", ".join(f"{name}=..." for name in options)
    return f"; options go with a call: submit(task.call(...), {example})"


def parameters_of(handler: Callable[..., Any], task: str) -> Parameters | None:
    """The parameters of a typed handler; None for one that takes the job itself.

    A handler takes the job itself if its only parameter is the job, or has no type that says what
    else it could be.
    """
    try:
        found = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):  # a builtin, which has no signature
        return None
    named = [each for each in found if each.kind not in _VARIADIC]
    if found and not named:
        return None
    job = next((each.name for each in named if _is_job(each)), "")
    if len(named) == 1 and (job or named[0].annotation in _ANY_TYPES):
        return None
    if [each.name for each in named] == ["job"] and named[0].annotation not in _JSON_TYPES:
        return None  # a stand-in for the job, as tests have
    return Parameters(handler, task, job)


def _is_job(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    if isinstance(annotation, str):
        return annotation in _JOB_TYPES or (parameter.name == "job" and annotation in _ANY_TYPES)
    if annotation in _ANY_TYPES:
        return parameter.name == "job"
    return getattr(annotation, "__qualname__", "") == "Job" and annotation.__module__.startswith(
        "tenure."
    )


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
    where: tuple[str, str, str] = ("", "", "")
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


Where = tuple[str, str, str]
"""Module, file and qualified name: how a child process finds a function again."""


def where(function: Callable[..., Any], what: str, *, in_process: bool) -> Where:
    """Where a function is; raises `UsageError` if a child process could not import it."""
    plain = inspect.unwrap(function)
    qualname = getattr(plain, "__qualname__", "")
    if in_process and (not qualname or "<" in qualname):
        raise UsageError(
            f"{what} must be importable, so define it at the top of a module (this one is "
            f"{qualname or function!r})"
        )
    code = getattr(plain, "__code__", None)
    return _module_name(plain), code.co_filename if code else "", qualname


def _module_name(function: Callable[..., Any]) -> str:
    """The module's name; for `__main__` started by `python -m` its importable name."""
    name = getattr(function, "__module__", "")
    spec = getattr(sys.modules.get(name), "__spec__", None) if name == "__main__" else None
    return spec.name if spec is not None else name


def where_children_find(lifespan: Callable[[], Any] | None, kinds: set[str]) -> Where | None:
    """Where the children find the lifespan; raises `UsageError` for what is none."""
    if lifespan is None:
        return None
    if hasattr(lifespan, "__aenter__"):
        raise UsageError(
            "lifespan is a function that returns an async context manager, such as one decorated "
            "with contextlib.asynccontextmanager; give the function itself, without calling it"
        )
    if "process" not in kinds:
        return None
    return where(lifespan, "the lifespan of a worker with process handlers", in_process=True)


class Tasks:
    """The handlers of one worker by name, and the schedules that they declare.

    `wrap` puts the handlers of the event loop inside another.
    """

    __slots__ = ("_by_name", "_fallback", "schedules")

    def __init__(
        self, tasks: Iterable[Task], wrap: Callable[[Handler], Handler] | None = None
    ) -> None:
        self._by_name: dict[str, Task] = {}
        for each in tasks:
            if not isinstance(each, Task):
                raise UsageError(f"{each!r} is not a task; decorate it with @task(name)")
            if each.name in self._by_name:
                raise UsageError(f"task {each.name!r} has two handlers; one must go")
            if each.parameters is not None:
                each.parameters.check()
            if wrap is not None and each.kind == "async":
                each, run = replace(each), wrap(each.run)
                object.__setattr__(each, "run", run)
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
        near = difflib.get_close_matches(name[:_NAME_CHARS_MAX], self._by_name, n=1)
        return next(iter(near), "")

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
