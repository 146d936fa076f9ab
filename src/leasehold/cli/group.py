"""The `leasehold` group: which commands there are, loaded one by one, and how errors end."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from leasehold.cli.config import debug_wanted
from leasehold.cli.exits import exit_code_of, line_of, problem_of
from leasehold.core.errors import traceback_of

COMMANDS = {
    "up": "Start everything: a store, a gateway, a worker with samples.",
    "gateway": "Serve jobs over HTTP.",
    "worker": "Run the tasks of a file or module.",
    "submit": "Put a job into a queue.",
    "watch": "Follow a job's events until it ends.",
    "ls": "List jobs, newest first.",
    "inspect": "Show one job in full.",
    "cancel": "End jobs: waiting ones now, running ones through their worker.",
    "retry": "Send finished jobs back to their queue.",
    "remove": "Delete jobs that nobody runs.",
    "pause": "Stop handing out jobs; what runs goes on.",
    "resume": "Hand out jobs again.",
    "queues": "Show how many jobs are in which state.",
    "outbox": "List events to be delivered, and send them again.",
    "workers": "Show who works, and on what.",
    "dead": "Show failed jobs by error class, retry or remove a class.",
    "top": "Watch queues and workers in the terminal.",
    "bridge": "Move waiting jobs from one queue to another.",
    "init": "Begin a project: a handler, settings, systemd units.",
    "keys": "Create, list and revoke API keys.",
    "api": "Print the OpenAPI or AsyncAPI document of a gateway.",
    "db": "Bring a database to the schema of this version.",
    "receiver": "Receive webhooks and show them on a page.",
    "pipeline": "Keep, count and audit the history of queues, on Spark.",
    "doctor": "Look for what will hurt, and say what helps.",
    "check": "Run the conformance suite on a live store.",
    "bench": "Measure this machine on a private store.",
    "completion": "Print the completion script for a shell.",
    "config": "Show settings and where they come from.",
    "version": "Say which version this is.",
}
"""Name and help line, so that `--help` imports no command. A test holds them to the commands."""


class LazyGroup(click.Group):
    """Imports a command's module when that command is asked for, and only then."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"leasehold.cli.commands.{cmd_name}")
        command: click.Command = module.command
        return command

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


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Settings: flags over LEASEHOLD_* variables over leasehold.toml over defaults "
    "(`leasehold config show --origin`). Exit codes: 0 ok, 1 error, 2 usage, 3 not found, "
    "4 conflict, 5 store unreachable, 6 job failed, 7 timeout, 8 doctor or audit found problems.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, help="Say which version this is.",
    callback=lambda ctx, _param, wanted: _say_version(ctx) if wanted else None,
)  # fmt: skip
def group() -> None:
    """Leasehold: a job system in which work is never owned, only leased."""


def _say_version(ctx: click.Context) -> None:
    from leasehold import __version__

    click.echo(f"leasehold {__version__}")
    ctx.exit()


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are told on stderr."""
    words = list(sys.argv[1:] if args is None else args)
    try:
        answer: Any = group.main(words, prog_name="leasehold", standalone_mode=False)
        sys.stdout.flush()
        return answer if isinstance(answer, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except BrokenPipeError:
        return _reader_went_away()
    except (Exception, KeyboardInterrupt) as error:
        return _tell(error, as_json="--json" in words)


def _tell(error: BaseException, *, as_json: bool) -> int:
    code = exit_code_of(error)
    if debug_wanted():
        sys.stderr.write(traceback_of(error))
    if as_json:
        import msgspec

        sys.stderr.write(msgspec.json.encode(problem_of(error)).decode() + "\n")
    elif isinstance(error, KeyboardInterrupt | click.Abort):
        sys.stderr.write("leasehold: interrupted\n")
    else:
        sys.stderr.write(f"leasehold: {line_of(error)}\n")
    return int(code)


def _reader_went_away() -> int:
    """`leasehold ls | head`: not an error worth words. Keep the interpreter from flushing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
