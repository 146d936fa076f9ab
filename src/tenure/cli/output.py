"""What the program says: data on stdout, notes on stderr, errors in one line, exit codes.

Ids, names, payloads and errors are text that others wrote. Characters in it that a terminal would
obey or reorder (control characters, bidirectional marks) are shown escaped. A random mark tells our
own colours from such text. Colours are for terminals, and not where NO_COLOR is set.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import click

from tenure.cli.config import colours_wanted
from tenure.core import errors
from tenure.core.encoding import CONTROL_CHARS, escaped, one_line

if TYPE_CHECKING:
    from tenure.core.job import JobRecord


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

    def __init__(self, exit_code: Exit, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.exit_code = exit_code
        self.code = exit_code.name.lower()
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
    """The exit code for an error; an unexpected one is 1."""
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


_COLOURS = {"green": "32", "red": "31", "yellow": "33", "blue": "34", "dim": "2", "bold": "1"}
_STATE_COLOURS = {
    "done": "green",
    "completed": "green",
    "succeeded": "green",
    "error": "red",
    "failed": "red",
    "dead_letter": "red",
    "running": "blue",
    "active": "blue",
    "canceled": "yellow",
    "cancelled": "yellow",
}


_MARK = f"\x1b{secrets.token_hex(8)}"
_UNSAFE = re.compile(rf"[{CONTROL_CHARS}]|\x1b(?!{_MARK[1:]})")
_PAINTED = re.compile(r"\x1b\[[0-9]+m")


def emit(value: Any, stream: Any = None) -> None:
    """One JSON object, one line, on stdout."""
    import msgspec

    stream = stream or sys.stdout
    text = msgspec.json.encode(value).decode()  # within it, such characters stand in strings only
    stream.write(_UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")
    stream.flush()


def emit_text(text: str) -> None:
    """A line for people, on stdout."""
    sys.stdout.write(shown(text) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line about what is going on, on stderr."""
    sys.stderr.write(shown(text) + "\n")
    sys.stderr.flush()


def answer(as_json: bool, value: Any, text: str) -> None:
    """What a command found or did, as one JSON object or as a line for people."""
    if as_json:
        emit(value)
    else:
        emit_text(text)


def answer_rows(
    as_json: bool,
    objects: Sequence[Any],
    headers: Sequence[str],
    row: Callable[[Any], Sequence[str]],
    none: str,
) -> None:
    """What a command listed: a JSON object a line, a table, or a note that there is nothing."""
    if as_json:
        for each in objects:
            emit(each)
    elif objects:
        emit_text(table(headers, map(row, objects)))
    else:
        note(none)


def shown(text: str) -> str:
    """Text that is safe for a terminal, and our own colours.

    >>> shown("a\\x1b[2Jb\\u202ec")
    'a\\\\x1b[2Jb\\\\u202ec'
    """
    return _UNSAFE.sub(escaped, text).replace(_MARK, "\x1b")


def paint(text: str, colour: str, stream: Any = None) -> str:
    """The text in a colour, where colours are wanted."""
    if colour not in _COLOURS or not colours_wanted(stream or sys.stdout):
        return text
    return f"{_MARK}[{_COLOURS[colour]}m{text}{_MARK}[0m"


def paint_state(state: str) -> str:
    """A state word in the colour of its meaning."""
    return paint(state, _STATE_COLOURS.get(state, ""))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns, aligned by what is visible; the last one is not padded."""
    lines = [list(headers), *(list(map(one_line, row)) for row in rows)]
    widths = [max(_visible(line[i]) for line in lines) for i in range(len(headers))]
    out = []
    for number, line in enumerate(lines):
        cells = [
            cell + " " * (width - _visible(cell)) for cell, width in zip(line, widths, strict=True)
        ]
        text = "  ".join(cells).rstrip()
        out.append(paint(text, "dim") if number == 0 else text)
    return "\n".join(out)


def ago(ts_ms: int, now_ms: int | None = None) -> str:
    """How long ago, in the largest unit that says enough.

    >>> ago(1_000, 3_500), ago(1_000, 181_000), ago(0)
    ('2s', '3m', '-')
    """
    if not ts_ms:
        return "-"
    seconds = max(0, (now_ms or int(time.time() * 1000)) - ts_ms) // 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _visible(text: str) -> int:
    return len(_PAINTED.sub("", shown(text)))


_JSON_FIELDS = ("payload", "result", "error", "progress")


def is_final(state: str, contract: str = "") -> bool:
    """Whether a job in this state has ended, by its contract or else by any.

    >>> is_final("failed"), is_final("failed", "inbox"), is_final("dead_letter", "inbox")
    (True, False, True)
    """
    from tenure.core.registry import find_contract, machines

    found = find_contract(contract) if contract else None
    if found is not None:
        return state in found.machine.final
    return state.lower() in {name.lower() for each in machines().values() for name in each.final}


def job_object(record: JobRecord) -> dict[str, Any]:
    """The job for a program: JSON fields as values, None where there is nothing."""
    import msgspec

    view: dict[str, Any] = msgspec.to_builtins(record, builtin_types=(bytes,))
    for field in _JSON_FIELDS:
        view[field] = plain_json(view[field])
    return view


def plain_json(raw: bytes) -> Any:
    """The decoded JSON; as the contract has it, `_raw` where the bytes are no JSON."""
    from tenure.core.encoding import shown_json

    return shown_json(raw) if raw else None


def safe_url(url: str) -> str:
    """A queue or store URL without its password."""
    from tenure.core.registry import parse_url

    return parse_url(url).safe if "://" in url else url
