"""Breaks a contract on purpose, to see that the verdict notices: a check must be able to fail.

    python -m tests.chaos.planted no-fence leasehold worker tests.chaos.app --from URL
    python -m tests.chaos.planted no-fence stubborn URL 4 400

The fault lives in a mutated copy of a script, in this process only, never in src. A mutation that
no longer fits its script is an error, not a silent pass.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from leasehold.contracts.streams.queue import SCRIPTS

# Fault: script, what stands there, what shall stand there instead.
PLANTED: dict[str, tuple[tuple[str, str, str], ...]] = {
    # A late outcome is taken as if its sender still held the lease.
    "no-fence": (("settle", "local why = why_lost(job, msg_id, fence, token)", "local why = nil"),),
    # What a dead worker held is never taken back.
    "no-reclaim": (
        ("claim", "\n    uncommon().take_back()\n", "\n"),
        ("upkeep", "\neach_idle(ARGV[2], take_back)\n", "\n"),
    ),
    # A submit that is sent again is stored again.
    "forgetful-submit": (
        ("submit", "local answer = known(id, idem, request_h)", "local answer = nil"),
    ),
}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """The fault is there within the block, in this process."""
    before = dict(SCRIPTS)
    plant(fault)
    try:
        yield
    finally:
        SCRIPTS.update(before)


def plant(fault: str) -> None:
    """Break the scripts of this process."""
    for name, good, bad in PLANTED[fault]:
        script = SCRIPTS[name]
        if script.source.count(good) != 1:
            raise SystemExit(f"planted fault {fault!r} does not fit script {name!r} any more")
        source = script.source.replace(good, bad)
        sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        SCRIPTS[name] = replace(script, source=source, sha=sha)


def main(argv: list[str]) -> int:
    """Break, then run what is asked for."""
    fault, program, *rest = argv
    plant(fault)
    if program == "stubborn":
        from tests.chaos.stubborn import main as stubborn

        stubborn(rest)
        return 0
    from leasehold.cli.group import run

    return run(rest)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
