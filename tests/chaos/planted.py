"""Breaks a contract on purpose, to see that the verdict notices: a check must be able to fail.

    python -m tests.chaos.planted streams no-fence tenure worker tests.chaos.app --queue URL
    python -m tests.chaos.planted streams no-fence stubborn URL 4 400

The fault lives in a mutated copy of a script, in this process only, never in src. A mutation that
no longer fits its script is an error, not a silent pass.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tenure.contracts.bullmq.scripts import SCRIPTS as BULLMQ_SCRIPTS
from tenure.contracts.omniq.calls import SCRIPTS as OMNIQ_SCRIPTS
from tenure.contracts.streams.queue import SCRIPTS as STREAMS_SCRIPTS
from tenure.store.redis import ScriptFolder

Edits = tuple[tuple[str, str, str], ...]
SCRIPTS: dict[str, ScriptFolder] = {
    "streams": STREAMS_SCRIPTS,
    "bullmq": BULLMQ_SCRIPTS,
    "omniq": OMNIQ_SCRIPTS,
}

# Fault: script, what stands there, what shall stand there instead.
_STREAMS: dict[str, Edits] = {
    # A late outcome is taken as if its sender still held the lease.
    "no-fence": (
        (
            "settle",
            "local why = why_lost(job, unreadable, msg_id, fence, token)",
            "local why = nil",
        ),
    ),
    # What a dead worker held is never taken back.
    "no-reclaim": (
        ("claim", "\n    general().take_expired()\n", "\n"),
        ("upkeep", "\neach_idle('upkeep_from', ARGV[2], take_back)\n", "\n"),
    ),
    # A submit that is sent again is stored again.
    "forgetful-submit": (
        ("submit", "local answer = known(id, idem, request_h)", "local answer = nil"),
    ),
}
_BULLMQ: dict[str, Edits] = {
    "no-fence": (
        ("settle", "if done[id] or lock ~= token .. ':' .. fence then", "if done[id] then"),
        ("settle", "if holders[n] == TOKEN .. fence and", "if"),
    ),
    "no-reclaim": (
        ("claim", "  upkeep.reap_lockless(STALLED_MAX)\n", ""),
        ("upkeep", "local reclaimed = reap_lockless(STALLED_MAX)", "local reclaimed = 0"),
    ),
    "forgetful-submit": (
        ("add", "local before = custom ~= '' and known(id, name, data)", "local before = nil"),
    ),
    # The lock is said to be extended, and is not.
    "idle-extend": (("extend", "call('SET', key .. ':lock'", "call('EXISTS', key .. ':lock'"),),
    # A lost job goes to the line, and stays with the dead worker as well.
    "half-reclaim": (
        ("claim", "  call('LREM', ACTIVE, '1', id)\n", ""),
        ("upkeep", "  call('LREM', ACTIVE, '1', id)\n", ""),
    ),
}
_OMNIQ: dict[str, Edits] = {
    "no-fence": (
        (
            "settle",
            "local why = refusal(job, token, fence, is_active and not done[id])",
            "local why = nil",
        ),
    ),
    "no-reclaim": (
        ("claim", "  due.reap(UPKEEP_MAX, CHANCE, true)\n", ""),
        (
            "upkeep",
            "local reclaimed, buried = reap(BATCH, tonumber(ARGV[3]), true)",
            "local reclaimed, buried = 0, 0",
        ),
    ),
    "forgetful-submit": (
        ("publish", "\n  answer = known(s, id, payload, gid)\n", "\n  answer = nil\n"),
        ("publish", "local answer = known(s, id, payload, gid)", "local answer = nil"),
        ("publish", "if was_published and was_published(id, payload_h) then", "if false then"),
    ),
}
PLANTED: dict[str, dict[str, Edits]] = {"streams": _STREAMS, "bullmq": _BULLMQ, "omniq": _OMNIQ}
EVERY = [(contract, fault) for contract, faults in PLANTED.items() for fault in faults]


@contextmanager
def planted(contract: str, fault: str) -> Iterator[None]:
    """The fault is there within the block, in this process."""
    before = dict(SCRIPTS[contract])
    plant(contract, fault)
    try:
        yield
    finally:
        SCRIPTS[contract]._read.update(before)


def plant(contract: str, fault: str) -> None:
    """Break the scripts of this process."""
    scripts = SCRIPTS[contract]
    for name, good, bad in PLANTED[contract][fault]:
        script = scripts[name]
        if script.source.count(good) != 1:
            raise SystemExit(f"planted fault {fault!r} does not fit script {name!r} any more")
        source = script.source.replace(good, bad)
        sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        scripts._read[name] = replace(script, source=source, sha=sha)  # what it would read, broken


def main(argv: list[str]) -> int:
    """Break, then run what is asked for."""
    contract, fault, program, *rest = argv
    plant(contract, fault)
    if program == "stubborn":
        from tests.chaos.stubborn import main as stubborn

        stubborn(rest)
        return 0
    from tenure.cli.console import run

    return run(rest)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
