"""`tenure version`: which version this is, and on what it runs."""

from __future__ import annotations

import platform

import click

from tenure import __version__
from tenure.cli.options import json_option
from tenure.cli.output import emit, emit_text


@click.command("version", short_help="Say which version this is.")
@json_option
def command(as_json: bool) -> None:
    """Say which version this is, and on which Python and machine it runs.

    \b
    tenure version --json
    """
    facts = {
        "tenure": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if as_json:
        emit(facts)
    else:
        emit_text(f"tenure {__version__} (Python {facts['python']}, {facts['system']})")
