"""The parameters of a typed handler: read from a job's payload, and written into one.

    async def greet(name: str, loud: bool = False) -> Greeting: ...

A payload for it is `{"name": "Ada"}`. The types are resolved on first use, because a handler may be
decorated before the classes that its annotations name are defined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, get_type_hints

import msgspec

from tenure.core.convert import decoder, explain, payload_of
from tenure.core.errors import InvalidJob, UsageError
from tenure.core.outcome import Fatal

_EMPTY = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_JOB_TYPES = ("Job", "tenure.Job", "worker.Job", "tenure.worker.Job")
_ANY_TYPES = (_EMPTY, Any, object, "Any", "typing.Any", "object")
_JSON_TYPES = (str, int, float, bool, list, dict, "str", "int", "float", "bool", "list", "dict")


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
                f"task {self._task!r}: {error} (its parameters: {', '.join(self.names) or 'none'})"
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
