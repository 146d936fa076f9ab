"""`tenure init`: a new project with a handler, settings and systemd units."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import click

from tenure.cli.exits import Exit, Failed
from tenure.cli.output import emit_text

_FILES = {
    "handlers.py": "handlers.py.txt",
    "tenure.toml": "tenure.toml.txt",
    "systemd/tenure-gateway.service": "gateway.service.txt",
    "systemd/tenure-worker.service": "worker.service.txt",
}


@click.command("init", short_help="Begin a project: a handler, settings, systemd units.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
def command(folder: Path) -> None:
    """Write a first handler, a settings file and units for systemd; nothing is overwritten.

    \b
    tenure init hello && cd hello
    """
    folder = folder.expanduser().absolute()
    there = [name for name in _FILES if (folder / name).exists()]
    if there:
        raise Failed(Exit.CONFLICT, f"{', '.join(there)} is there already; nothing was written")
    program = shutil.which("tenure") or f"{sys.executable} -P -m tenure.cli"
    for name, source in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (files("tenure.cli") / "skeleton" / source).read_text()
        path.write_text(
            text.format(folder=folder, program=program) if name.endswith(".service") else text
        )
    emit_text("\n".join(str(folder / name) for name in _FILES))
    where = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    emit_text(f"next: {where}tenure up handlers.py")
