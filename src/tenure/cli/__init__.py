"""The command line: the composition root, and the only place that reads the environment.

`group` has the table of commands; the module of a command is imported when the command is called,
so that `tenure submit` never pays for the web server.
"""

from __future__ import annotations


def main() -> None:
    """The `tenure` program."""
    from tenure.cli.console import run

    raise SystemExit(run())
