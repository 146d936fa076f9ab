"""The command line: the composition root, and the only place that reads the environment.

A command is one file under `commands`, imported when it is called, so that `tenure submit` never
pays for the web server. `group` finds commands, `config` knows where a setting comes from, `exits`
turns errors into one line and an exit code, `output` keeps data on stdout and talk on stderr.
"""

from __future__ import annotations


def main() -> None:
    """The `tenure` program."""
    from tenure.cli.group import run

    raise SystemExit(run())
