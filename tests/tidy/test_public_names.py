"""The public API is what `leasehold.__all__` says; a change of it is a change of this list."""

import inspect
import tomllib

import pytest

import leasehold
from tests.tidy.reading import ROOT, text

PUBLIC = [
    "Cancel",
    "Fatal",
    "Job",
    "LeaseLost",
    "LeaseholdError",
    "NewJob",
    "Park",
    "RateLimit",
    "Retry",
    "RetryPolicy",
    "Snooze",
    "Worker",
    "exponential",
    "fixed",
    "open_ledger",
    "open_queue",
    "task",
]


def test_the_public_names_are_pinned_and_sorted() -> None:
    assert list(leasehold.__all__) == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", sorted(leasehold.__all__))
def test_every_public_name_says_what_it_is_for(name: str) -> None:
    thing = getattr(leasehold, name)
    assert inspect.isclass(thing) or inspect.isroutine(thing), f"leasehold.{name} is a bare value"
    assert thing.__module__.startswith("leasehold")
    assert (thing.__doc__ or "").strip(), f"leasehold.{name} has no docstring"
    assert not (thing.__doc__ or "").startswith(f"{name}("), f"leasehold.{name}: write a docstring"


def test_the_version_is_the_one_in_the_project_file() -> None:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    assert leasehold.__version__ == project["version"]
