"""The table of steps by which the audit proves jobs sound has no hole for a broken promise."""

from __future__ import annotations

import pytest

from tenure.core.journal import AGAIN
from tenure.core.registry import machines
from tenure.core.state import Machine
from tenure.pipeline.audit.rules import known_steps


def steps_of(machine: Machine) -> list[tuple[str, str, str]]:
    rows = known_steps().select(["contract", "type", "from_state", "to_state"]).to_pylist()
    return [
        (row["type"], row["from_state"], row["to_state"])
        for row in rows
        if row["contract"] == machine.contract
    ]


@pytest.fixture(params=sorted(machines()))
def machine(request: pytest.FixtureRequest) -> Machine:
    return machines()[request.param]


def test_only_a_claim_starts_a_job(machine: Machine) -> None:
    idle = {kind for kind, here, there in steps_of(machine)
            if here not in machine.running and there in machine.running}  # fmt: skip
    assert idle == {"claim"}


def test_a_started_job_waits_again_only_for_a_reason(machine: Machine) -> None:
    """So a chain of such steps keeps I14: that one is proven with the chain, without counting."""
    ends = (*machine.running, *machine.final)
    back = {kind for kind, here, there in steps_of(machine)
            if here in ends and there in machine.states and there not in ends}  # fmt: skip
    assert {"retry", "reap", "reopen"} <= back <= AGAIN


def test_what_ended_is_changed_only_by_a_reopen_or_a_removal(machine: Machine) -> None:
    after = {kind for kind, here, _ in steps_of(machine) if here in machine.final}
    assert after == {"reopen", "remove"}


def test_only_a_completion_succeeds(machine: Machine) -> None:
    ways = {kind for kind, _, there in steps_of(machine) if there == machine.final[0]}
    assert ways == {"complete"}


def test_what_is_removed_is_in_no_state_afterwards(machine: Machine) -> None:
    left = {there for kind, _, there in steps_of(machine) if kind == "remove"}
    assert not left & set(machine.states)


def test_no_step_of_a_queue_or_a_refusal_is_one_of_a_job(machine: Machine) -> None:
    assert not {"pause", "resume", "reject"} & {kind for kind, _, _ in steps_of(machine)}
