"""What all commands share: exit codes and errors, output, and the group that runs a command.

Data goes to stdout, notes and errors to stderr. Ids, names, payloads and errors are text that
others wrote: characters that a terminal would interpret or reorder (control characters,
bidirectional marks) are escaped. A random marker distinguishes our own colours from such text.
Colours are for terminals only, and not if NO_COLOR is set.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenure.cli.config import (
    colours_wanted,
    debug_wanted,
    load_config,
)
from tenure.core import errors
from tenure.core.config import is_storable, running_up
from tenure.core.encoding import CONTROL_CHARS, escaped, one_line

if TYPE_CHECKING:
    from tenure.core.job import JobRecord
    from tenure.core.seam import Ledger


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
    """Ends a command with an exit code and a message with the problem and its remedy."""

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
    """The error in one line, with a remedy if one is known."""
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
    text = msgspec.json.encode(value).decode()  # in JSON, such characters occur only in strings
    stream.write(_UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")
    stream.flush()


def emit_text(text: str) -> None:
    """Write a line for people to stdout."""
    sys.stdout.write(shown(text) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line about progress or a problem to stderr."""
    sys.stderr.write(shown(text) + "\n")
    sys.stderr.flush()


def note_child_line(name: str, line: str) -> None:
    """Write a line of a child's output to stderr, after the child's name."""
    note(f"{paint(f'{name:>8} | ', 'dim', sys.stderr)}{line}")


def answer(as_json: bool, value: Any, text: str) -> None:
    """Print the result of a command as one JSON object or as a line for people."""
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
    """Print a list as one JSON object per line or as a table; `none` if it is empty."""
    if as_json:
        for each in objects:
            emit(each)
    elif objects:
        emit_text(table(headers, map(row, objects)))
    else:
        note(none)


def shown(text: str) -> str:
    """Text that is safe for a terminal, with our own colours.

    >>> shown("a\\x1b[2Jb\\u202ec")
    'a\\\\x1b[2Jb\\\\u202ec'
    """
    return _UNSAFE.sub(escaped, text).replace(_MARK, "\x1b")


def paint(text: str, colour: str, stream: Any = None) -> str:
    """The text in a colour, if the stream shows colours."""
    if colour not in _COLOURS or not colours_wanted(stream or sys.stdout):
        return text
    return f"{_MARK}[{_COLOURS[colour]}m{text}{_MARK}[0m"


def paint_state(state: str, own: str = "") -> str:
    """A state in its colour, with the contract's own word for it if that is another."""
    word = f" ({own})" if own and own != state else ""
    return paint(state, _STATE_COLOURS.get(state, "")) + paint(word, "dim")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with aligned columns; the last one is not padded."""
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
    """How long ago, in the largest unit that is not zero.

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


def job_object(record: JobRecord) -> dict[str, Any]:
    """The job for `--json`: JSON fields are decoded, and empty ones are None.

    `state` is the one that all contracts share, `own_state` the contract's word.
    """
    import msgspec

    from tenure.core.portable import state_of

    view: dict[str, Any] = msgspec.to_builtins(record, builtin_types=(bytes,))
    view |= {"state": state_of(record), "own_state": record.state}
    for field in _JSON_FIELDS:
        view[field] = plain_json(view[field])
    return view


def plain_json(raw: bytes) -> Any:
    """The decoded JSON; bytes that are no JSON are under `_raw`, as in the contract."""
    from tenure.core.encoding import shown_json

    return shown_json(raw) if raw else None


def safe_url(url: str) -> str:
    """A queue or store URL without its password."""
    from tenure.core.registry import parse_url

    return parse_url(url).safe if "://" in url else url


# The commands.

_TABLE = (
    ("up", "up", "Start everything: a store, a gateway, a worker with samples."),
    ("gateway", "serve", "Serve jobs over HTTP."),
    ("worker", "serve", "Run the tasks of a file or module."),
    ("submit", "jobs", "Put a job into a queue."),
    ("watch", "jobs", "Follow a job's events until it ends."),
    ("ls", "jobs", "List jobs, newest first."),
    ("inspect", "jobs", "Show one job in full."),
    ("cancel", "jobs", "End jobs: waiting ones now, running ones through their worker."),
    ("retry", "jobs", "Send finished jobs back to their queue."),
    ("remove", "jobs", "Delete jobs that are not running."),
    ("pause", "queues", "Stop handing out jobs; running jobs continue."),
    ("resume", "queues", "Hand out jobs again."),
    ("queues", "queues", "Show how many jobs are in which state."),
    ("schedules", "queues", "Show when which jobs are stored, and remove a schedule."),
    ("outbox", "queues", "List events to be delivered, and send them again."),
    ("workers", "monitor", "Show the workers and their jobs."),
    ("dead", "monitor", "Show failed jobs by error class, retry or remove a class."),
    ("top", "monitor", "Watch queues and workers in the terminal."),
    ("bridge", "bridge", "Move waiting jobs from one queue to another."),
    ("init", "project", "Start a project: a handler, settings, systemd units."),
    ("audit", "keys", "Verify and export the audit log of gateways."),
    ("keys", "keys", "Create, list and revoke API keys."),
    ("api", "project", "Print the OpenAPI or AsyncAPI document, or the rights."),
    ("db", "project", "Migrate a database to this version."),
    ("receiver", "serve", "Receive webhooks and show them on a page."),
    ("pipeline", "pipeline", "Capture, count and audit the history of queues, on Spark."),
    ("doctor", "doctor", "Look for problems, each with a remedy."),
    ("check", "selftest", "Run the conformance suite on a live store."),
    ("bench", "selftest", "Measure this machine on a private store."),
    ("completion", "project", "Print the completion script for a shell."),
    ("config", "project", "Show settings and where they come from."),
    ("version", "project", "Print the version."),
)
"""Name, module and help line. `submit` is `submit_command` in `jobs.py`; `--help` imports none."""

COMMANDS = {name: line for name, _, line in _TABLE}
_MODULES = {name: module for name, module, _ in _TABLE}

Answer = TypeVar("Answer")

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
queue_option = click.option(
    "--queue", "-q", "queue_url", metavar="QUEUE",
    help="A URL, or a name in tenure.toml; default: TENURE_QUEUE_URL.",
)  # fmt: skip
needed_queue_option = click.option(
    "--queue", "-q", "queue_url", metavar="QUEUE", required=True,
    help="A URL, or a name in tenure.toml.",
)  # fmt: skip
queues_option = click.option(
    "--queue", "-q", "queue_urls", metavar="QUEUE", multiple=True,
    help="A URL, or a name in tenure.toml; repeatable.",
)  # fmt: skip

_MASK = ":***@"
_PASSWORD = re.compile(r"://[^/@\s]*:(?!\*\*\*@)[^/@\s]+@")


class LazyGroup(click.Group):
    """Imports the module of a command when that command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"tenure.cli.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        command.short_help = COMMANDS[cmd_name]
        return _bounded(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"there is no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _bounded(command: click.Command) -> click.Command:
    """Make all numeric options refuse numbers that no store can represent (1e400, nan)."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _bounded(inner)
    for param in command.params:
        numbers = param.type.name.startswith(("float", "integer"))
        if numbers and not isinstance(param.type.convert, partial):
            param.type.convert = partial(_converted, param.type.convert)  # type: ignore[method-assign]
    return command


def _converted(convert: Any, value: Any, param: Any, ctx: Any) -> Any:
    number = convert(value, param, ctx)
    if not is_storable(number):
        raise click.BadParameter("a number is at most 2^53, and none is infinite", ctx, param)
    return number


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Settings: flags over TENURE_* variables over tenure.toml over defaults "
    "(`tenure config show --origin`). Exit codes: 0 ok, 1 error, 2 usage, 3 not found, "
    "4 conflict, 5 store unreachable, 6 job failed, 7 timeout, 8 doctor or audit found problems.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, help="Print the version.",
    callback=lambda ctx, _param, given: _say_version(ctx) if given else None,
)  # fmt: skip
def group() -> None:
    """Tenure: a job system in which work is never owned, only leased."""


def _say_version(ctx: click.Context) -> None:
    from tenure import __version__

    click.echo(f"tenure {__version__}")
    ctx.exit()


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors go to stderr."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        if args is None:
            _keep_private(given)
        given = _with_passwords(given)
        code: Any = group.main(given, prog_name="tenure", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except BrokenPipeError:
        return _end_of_pipe()
    except (Exception, KeyboardInterrupt) as error:
        return _report(error, as_json="--json" in given)


def _keep_private(args: list[str]) -> None:
    """Make new files private to this user, and warn of a password on the command line.

    Handlers and new projects may still write files for the user's group.
    """
    before = os.umask(0o077)
    if args[:1] in (["worker"], ["init"]):
        os.umask(before & 0o077)
    if any(_PASSWORD.search(arg) for arg in args):
        sys.stderr.write(
            "tenure: every user of this machine can read a password on a command line; put the "
            "URL into the environment, or into a file that a variable such as "
            "TENURE_QUEUE_URL_FILE names\n"
        )


def _with_passwords(args: list[str]) -> list[str]:
    """Restore the passwords in URLs of a running `tenure up`, which are shown masked."""
    if not any(_MASK in arg for arg in args):
        return args
    up = running_up(load_config().data)
    known = {safe_url(url): url for url in (*up.queues, up.redis_url)} if up else {}
    found = []
    for arg in args:
        option, mark, url = arg.partition("=") if arg.startswith("--") else ("", "", arg)
        found.append(option + mark + known.get(url, url))
    return found


def _report(error: BaseException, *, as_json: bool) -> int:
    code = exit_code_of(error)
    if debug_wanted():
        note(errors.traceback_of(error).rstrip())
    if as_json:
        emit(problem_of(error), sys.stderr)
    elif isinstance(error, KeyboardInterrupt | click.Abort):
        note("tenure: interrupted")
    else:
        note(f"tenure: {line_of(error)}")
    return int(code)


def _end_of_pipe() -> int:
    """`tenure ls | head` is no error; keep the interpreter from flushing stdout again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def with_ledger(queue_url: str | None, ask: Callable[[Ledger], Awaitable[Answer]]) -> Answer:
    """Call `ask` with the ledger of this queue, or of the configured one."""
    import asyncio  # not above: commands that need no queue start faster

    from tenure.core.registry import open_ledger

    async def run() -> Answer:
        ledger = open_ledger(load_config().text("queue_url", queue_url))
        try:
            return await ask(ledger)
        finally:
            await ledger.close()

    return asyncio.run(run())
