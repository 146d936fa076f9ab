"""A pytest plugin for `tenure check`: one store, and which clauses each test proves."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tenure.cli.conformance import ADAPTER, RESULT, Ran

_ran: dict[str, Ran] = {}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Only the store that was asked for; tests that concern none are of the suite itself."""
    wanted = os.environ.get(ADAPTER)
    items[:] = [item for item in items if _adapter(item) == wanted]


def _adapter(item: Any) -> str:
    spec = getattr(item, "callspec", None)
    return str(spec.params.get("contract", "")) if spec else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any) -> Generator[None, Any, Any]:
    """Note the test; a failure in any of its phases is one."""
    report = yield
    clauses = tuple(str(arg) for mark in item.iter_markers("clause") for arg in mark.args)
    before = _ran.get(item.nodeid)
    passed = report.outcome == "passed" and (before is None or before.passed)
    _ran[item.nodeid] = Ran(item.nodeid, passed, clauses)
    return report


def pytest_sessionfinish() -> None:
    """Leave the notes where the command looks for them."""
    if RESULT in os.environ:
        Path(os.environ[RESULT]).write_bytes(msgspec.json.encode(list(_ran.values())))
