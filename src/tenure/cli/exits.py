"""What the program answers to its caller: exit codes, and errors in one line or one object."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import click

from tenure.core import errors


class Exit(IntEnum):
    """The exit codes, in the order of the documentation."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    UNREACHABLE = 5
    JOB_FAILED = 6
    TIMEOUT = 7
    PROBLEMS = 8
    INTERRUPTED = 130


class Failed(Exception):
    """A command's own way to end: an exit code, what was wrong, and what would be right."""

    def __init__(self, exit_code: Exit, detail: str, *, code: str = "", **extra: Any) -> None:
        super().__init__(detail)
        self.exit_code = exit_code
        self.code = code or exit_code.name.lower()
        self.extra = extra


_BY_ERROR: tuple[tuple[type[Exception], Exit], ...] = (
    (errors.UsageError, Exit.USAGE),
    (errors.NotFound, Exit.NOT_FOUND),
    (errors.Conflict, Exit.CONFLICT),
    (errors.StoreUnreachable, Exit.UNREACHABLE),
    (errors.ReplyLost, Exit.UNREACHABLE),
    (click.UsageError, Exit.USAGE),
    (TimeoutError, Exit.TIMEOUT),
)


def exit_code_of(error: BaseException) -> Exit:
    """The exit code for an error; what nobody foresaw is 1."""
    if isinstance(error, Failed):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return Exit.INTERRUPTED
    for kind, code in _BY_ERROR:
        if isinstance(error, kind):
            return code
    return Exit.ERROR


def line_of(error: BaseException) -> str:
    """The error in one line, with the way out where it is known."""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "tenure"
        return f"{_flat(error.format_message())} (see `{where} --help`)"
    if isinstance(error, click.ClickException):
        return _flat(error.format_message())
    text = _flat(str(error)) or type(error).__name__
    if isinstance(error, errors.StoreUnreachable):
        return f"{text}; `tenure up` starts a store, `tenure doctor` looks closer"
    if isinstance(error, Failed | errors.TenureError):
        return text
    return f"{type(error).__name__}: {text} (TENURE_DEBUG=1 shows where)"


def problem_of(error: BaseException) -> dict[str, Any]:
    """The error as a problem object (RFC 9457) with our `code` and the exit code."""
    exit_code = exit_code_of(error)
    code = getattr(error, "code", None)
    problem: dict[str, Any] = {
        "type": "about:blank",
        "title": exit_code.name.lower().replace("_", " "),
        "detail": line_of(error),
        "code": code if isinstance(code, str) else exit_code.name.lower(),
        "exit_code": int(exit_code),
    }
    if isinstance(error, Failed):
        problem |= error.extra
    return problem


def _flat(text: str) -> str:
    return " ".join(text.split())
