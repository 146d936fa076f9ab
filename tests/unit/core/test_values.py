"""The values that cross the seam: they survive a journey, and errors say what is needed."""

import doctest
import importlib
import pkgutil

import msgspec
import pytest

import leasehold.core
from leasehold.core import errors
from leasehold.core.event import EVENT_TYPES, JournalEvent
from leasehold.core.job import Submitted
from leasehold.core.outcome import BURIED, COMPLETED, Retried

MODULES = [
    f"leasehold.core.{module.name}" for module in pkgutil.iter_modules(leasehold.core.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_some_docstrings_have_examples() -> None:
    """Else the test above would prove nothing."""
    finder = doctest.DocTestFinder()
    examples = [
        example
        for name in MODULES
        for found in finder.find(importlib.import_module(name))
        for example in found.examples
    ]
    assert len(examples) >= 4


def test_an_event_survives_the_journey_through_json() -> None:
    event = JournalEvent(
        seq="7", contract="memory", queue="q", job_id="j", type="claim", ts_ms=5, ver=2, fence=1
    )
    sent = msgspec.json.encode(event)
    assert msgspec.json.decode(sent, type=JournalEvent) == event
    assert b"result_h" not in sent


def test_event_types_stand_once() -> None:
    assert len(EVENT_TYPES) == len(set(EVENT_TYPES))


@pytest.mark.parametrize(
    ("status", "accepted"),
    [("created", True), ("replayed", True), ("conflict", False), ("full", False)],
)
def test_a_submit_is_accepted_when_the_job_is_stored(status: str, accepted: bool) -> None:
    assert Submitted("j", status).accepted is accepted  # type: ignore[arg-type]


def test_verdicts_are_compared_by_value() -> None:
    assert Retried(5) == Retried(5) != Retried(6)
    assert COMPLETED != BURIED


def test_every_error_has_a_code_of_its_own() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.LeaseholdError)
    ]
    codes = [kind.code for kind in kinds]
    assert len(codes) == len(set(codes)) > 10
    assert all(kind.__doc__ for kind in kinds)


def test_an_error_says_where_it_happened() -> None:
    error = errors.Conflict("taken", contract="streams", operation="submit", reply=b"x")
    assert (str(error), error.contract, error.operation, error.reply) == (
        *("taken", "streams", "submit"),
        b"x",
    )
    assert "j7" in str(errors.LeaseLost("j7"))
    assert errors.QueueFull("full", retry_after_ms=70).retry_after_ms == 70
