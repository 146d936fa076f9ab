"""A pytest plugin that writes down which clauses each test proves, for `leasehold check`."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leasehold.cli.conformance import RESULT, Ran

_ran: dict[str, Ran] = {}


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
