"""The public API is what `tenure.__all__` says; a change of it is a change of this list."""

import inspect
import tomllib

import pytest

import tenure
from tests.tidy.reading import ROOT, text

PUBLIC = [
    "Cancel",
    "Client",
    "Conflict",
    "Fatal",
    "Handle",
    "InvalidJob",
    "InvalidResult",
    "Job",
    "JobCancelled",
    "JobFailed",
    "LeaseLost",
    "NewJob",
    "NotFound",
    "Park",
    "QueueFull",
    "RateLimit",
    "Retry",
    "RetryPolicy",
    "Snooze",
    "StoreUnreachable",
    "TenureError",
    "Timeout",
    "Worker",
    "exponential",
    "fixed",
    "open_ledger",
    "open_queue",
    "sentry_scope",
    "task",
]


def test_the_public_names_are_pinned_and_sorted() -> None:
    assert list(tenure.__all__) == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", sorted(tenure.__all__))
def test_every_public_name_says_what_it_is_for(name: str) -> None:
    thing = getattr(tenure, name)
    assert inspect.isclass(thing) or inspect.isroutine(thing), f"tenure.{name} is a bare value"
    assert thing.__module__.startswith("tenure")
    assert (thing.__doc__ or "").strip(), f"tenure.{name} has no docstring"
    assert not (thing.__doc__ or "").startswith(f"{name}("), f"tenure.{name}: write a docstring"


def test_the_version_is_the_one_in_the_project_file() -> None:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    assert tenure.__version__ == project["version"]
