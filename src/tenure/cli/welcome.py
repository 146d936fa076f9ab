"""What `tenure up` says once it runs: where things are, and what to try next."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tenure.cli.output import paint
from tenure.cli.settings import DATA_FOLDER


def welcome(
    url: str, pages: str, invitations: Sequence[str], program: str, *, samples: bool
) -> str:
    """Where things are, and what to try next; `pages` is the URL of the dashboard."""
    flowing = "sample jobs are flowing" if samples else "waiting for jobs"
    metrics = f"{pages}/metrics"
    more = "".join(f"\n  {line}" for line in invitations)
    return f"""\
{paint(f"tenure is up: {pages}", "bold")}   API {url}/docs   metrics {metrics}   ({flowing})

  submit a job    curl -s {url}/v1/jobs -H 'Content-Type: application/json' \\
                    -d '{{"task": "chat", "payload": {{"prompt": "hello"}}}}'
  follow it       curl -sN {url}/v1/jobs/ID/events
  read it         curl -s {url}/v1/jobs/ID{more}

  or: {program} submit chat -d '{{"prompt": "hello"}}' --follow
      {program} ls        {program} queues        {program} top
  Ctrl-C drains and stops."""


def how_to_call(data: Path) -> str:
    """`tenure`, or where it is if a shell would not find it by that name.

    Data that lie elsewhere than the other commands look are named before it.
    """
    mine = Path(sys.executable).with_name("tenure")
    found = shutil.which("tenure")
    program = str(mine)
    if found is not None and Path(found).samefile(mine):
        program = "tenure"
    else:
        with contextlib.suppress(ValueError):
            program = str(mine.relative_to(Path.cwd()))
    is_usual = data.resolve() == Path(DATA_FOLDER).resolve()
    return program if is_usual else f"TENURE_DATA={shlex.quote(str(data))} {program}"
