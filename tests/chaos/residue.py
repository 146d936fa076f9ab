"""What a store still holds when all its jobs should have ended."""

from __future__ import annotations

from tenure.core.registry import open_ledger
from tenure.core.state import Machine


async def unfinished(url: str, machine: Machine) -> dict[str, int]:
    """How many jobs are in a state that is not an end, as `Subject.residue` tells it."""
    ledger = open_ledger(url)
    try:
        states = (await ledger.counts()).states
    finally:
        await ledger.close()
    left = [name for name in machine.states if name not in machine.final]
    return {"unfinished jobs": sum(states[name] for name in left)}
