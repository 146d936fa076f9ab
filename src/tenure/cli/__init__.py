"""The command line: the composition root, and the only reader of the environment.

`console` has the table of commands. The module of a command is imported when the command is called,
so `tenure submit` does not load the web server.
"""

from __future__ import annotations


def main() -> None:
    """The `tenure` program."""
    from tenure.cli.console import run

    raise SystemExit(run())
