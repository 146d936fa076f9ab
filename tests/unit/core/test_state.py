"""The state tables: what they allow, and that each of them makes sense as a machine."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.core.errors import InvalidTransition
from tenure.core.registry import contracts
from tenure.core.state import Machine

MACHINES = {name: contract.machine for name, contract in contracts().items()}

machines = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())


def listed(machine: Machine) -> set[tuple[str, str]]:
    return {(here, there) for here, targets in machine.steps.items() for there in targets}


def reachable(machine: Machine, *, reopening: bool = False) -> set[str]:
    seen, ahead = set(machine.initial), list(machine.initial)
    while ahead:
        here = ahead.pop()
        targets = machine.steps.get(here, ()) + (machine.reopen.get(here, ()) if reopening else ())
        ahead += [there for there in targets if there not in seen]
        seen |= set(targets)
    return seen


@machines
def test_a_step_is_allowed_exactly_when_the_table_lists_it(machine: Machine) -> None:
    for here in machine.states:
        for there in machine.states:
            assert machine.allows(here, there) == ((here, there) in listed(machine))


@machines
def test_a_step_that_is_not_in_the_table_raises_and_names_those_that_are(machine: Machine) -> None:
    for here in machine.states:
        for there in set(machine.states) - set(machine.steps.get(here, ())):
            with pytest.raises(InvalidTransition) as raised:
                machine.require(here, there)
            assert raised.value.contract == machine.contract
            for possible in machine.steps.get(here, ("nothing",)):
                assert possible in str(raised.value)


@machines
def test_every_state_can_be_reached_from_the_beginning(machine: Machine) -> None:
    assert reachable(machine) == set(machine.states)


@machines
def test_no_job_is_caught_in_a_state_without_end(machine: Machine) -> None:
    for start in machine.states:
        ahead = reachable(msgspec.structs.replace(machine, initial=(start,)))
        assert ahead & set(machine.final), f"no end can be reached from {start!r}"


@machines
def test_a_final_state_is_left_only_by_reopening(machine: Machine) -> None:
    for state in machine.final:
        assert not machine.steps.get(state)
        for there in machine.reopen.get(state, ()):
            assert there in machine.initial
            assert machine.allows(state, there, reopening=True)
            assert not machine.allows(state, there)


@machines
def test_only_finished_jobs_are_reopened(machine: Machine) -> None:
    assert set(machine.reopen) <= set(machine.final)


@machines
def test_a_running_job_can_end_and_can_come_back(machine: Machine) -> None:
    for state in machine.running:
        ahead = reachable(msgspec.structs.replace(machine, initial=(state,)))
        assert ahead & set(machine.final)
        assert ahead & set(machine.initial)


@machines
def test_words_are_in_one_role_only(machine: Machine) -> None:
    roles = [set(machine.initial), set(machine.running), set(machine.final)]
    assert not roles[0] & roles[1]
    assert not roles[1] & roles[2]
    assert not roles[0] & roles[2]
    assert set().union(*roles) <= set(machine.states)


@given(data=st.data())
def test_every_walk_through_a_table_keeps_to_its_words(data: st.DataObject) -> None:
    machine = data.draw(st.sampled_from(sorted(MACHINES.values(), key=lambda m: m.contract)))
    here = data.draw(st.sampled_from(machine.initial))
    for _ in range(12):
        targets = machine.steps.get(here, ())
        if not targets:
            assert here in machine.final
            return
        there = data.draw(st.sampled_from(targets))
        machine.require(here, there)
        here = there
        assert here in machine.states


def test_a_machine_is_found_under_its_contract() -> None:
    assert all(name == machine.contract for name, machine in MACHINES.items())
