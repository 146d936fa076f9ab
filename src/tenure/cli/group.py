"""The table of commands, each loaded when it is called; what they share; how the program ends."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenure.cli.config import debug_wanted, is_storable, load_config, running_up
from tenure.cli.output import emit, exit_code_of, line_of, note, problem_of, safe_url
from tenure.core.errors import traceback_of

if TYPE_CHECKING:
    from tenure.core.seam import Ledger

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
    ("remove", "jobs", "Delete jobs that nobody runs."),
    ("pause", "queues", "Stop handing out jobs; what runs goes on."),
    ("resume", "queues", "Hand out jobs again."),
    ("queues", "queues", "Show how many jobs are in which state."),
    ("outbox", "queues", "List events to be delivered, and send them again."),
    ("workers", "monitor", "Show who works, and on what."),
    ("dead", "monitor", "Show failed jobs by error class, retry or remove a class."),
    ("top", "monitor", "Watch queues and workers in the terminal."),
    ("bridge", "bridge", "Move waiting jobs from one queue to another."),
    ("init", "project", "Begin a project: a handler, settings, systemd units."),
    ("audit", "keys", "Verify and export the audit log of gateways."),
    ("keys", "keys", "Create, list and revoke API keys."),
    ("api", "project", "Print the OpenAPI or AsyncAPI document, or the rights."),
    ("db", "project", "Bring a database to the schema of this version."),
    ("receiver", "serve", "Receive webhooks and show them on a page."),
    ("pipeline", "pipeline", "Keep, count and audit the history of queues, on Spark."),
    ("doctor", "doctor", "Look for what will hurt, and say what helps."),
    ("check", "selftest", "Run the conformance suite on a live store."),
    ("bench", "selftest", "Measure this machine on a private store."),
    ("completion", "project", "Print the completion script for a shell."),
    ("config", "project", "Show settings and where they come from."),
    ("version", "project", "Say which version this is."),
)
"""Name, module and help line: `submit` is `submit_command` in `jobs.py`. `--help` imports none."""

COMMANDS = {name: line for name, _, line in _TABLE}
_MODULES = {name: module for name, module, _ in _TABLE}

Answer = TypeVar("Answer")

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
queue_option = click.option(
    "--queue", "-q", "queue_url", metavar="URL", help="The queue; default: TENURE_QUEUE_URL."
)

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
    """Make all numeric options refuse numbers that no store can hold (1e400, nan)."""
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
    "--version", is_flag=True, is_eager=True, expose_value=False, help="Say which version this is.",
    callback=lambda ctx, _param, wanted: _say_version(ctx) if wanted else None,
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

    Handlers and a new project may write files for the user's group as before.
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
    """Put the passwords back into URLs of a running `tenure up`, which we show masked."""
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
        note(traceback_of(error).rstrip())
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
    """Open the ledger of this queue, or of the configured one, ask it, and close it."""
    import asyncio  # here, so that commands which ask no queue start faster

    from tenure.core.registry import open_ledger

    async def asked() -> Answer:
        ledger = open_ledger(load_config().text("queue_url", queue_url))
        try:
            return await ask(ledger)
        finally:
            await ledger.close()

    return asyncio.run(asked())
