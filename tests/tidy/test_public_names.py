"""The public API is `__all__` of these modules; a change of it is a change of this list."""

import inspect
import tomllib
from importlib import import_module

import pytest

import tenure
from tests.tidy.reading import ROOT, text

PUBLIC = {
    "tenure": [
        "Cancel",
        "Client",
        "Conflict",
        "Fatal",
        "Handle",
        "HandlerFailed",
        "InvalidJob",
        "InvalidResult",
        "Job",
        "JobCancelled",
        "JobFailed",
        "LeaseLost",
        "NewJob",
        "NotFound",
        "NotReplicated",
        "Park",
        "QueueFull",
        "RateLimit",
        "ReplyLost",
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
    ],
    "tenure.contracts.bullmq": [
        "BullmqJournal",
        "BullmqLedger",
        "BullmqQueue",
        "Children",
        "Event",
        "Flow",
        "Metrics",
        "Producer",
        "QueueEvents",
        "SchedulerRecord",
        "open_events",
        "open_producer",
    ],
    "tenure.contracts.omniq": [
        "Client",
        "JobContext",
        "NotActive",
        "OmniqJournal",
        "OmniqLedger",
        "OmniqQueue",
        "Paused",
        "Refused",
        "Reserved",
        "SyncClient",
        "TokenMismatch",
    ],
    "tenure.gateway": [
        "Caller",
        "CallerHook",
        "GatewaySettings",
        "app",
        "create_app",
        "router",
    ],
    "tenure.pipeline": [
        "SparkSettings",
        "open_session",
        "prepare",
        "run_task",
    ],
    "tenure.sync": [
        "Client",
        "Handle",
    ],
    "tenure.testing": [
        "Clock",
        "FakeJob",
        "MemoryQueue",
        "run_task",
        "serving",
    ],
    "tenure.webhooks": [
        "HEADERS",
        "InvalidWebhook",
        "MemoryNonces",
        "NonceStore",
        "SqliteNonces",
        "Verified",
        "check",
        "new_secret",
        "read_secret",
        "signed_headers",
        "verify",
    ],
}
NAMES = [
    (module, name)
    for module, names in PUBLIC.items()
    for name in names
    if (module, name) != ("tenure.gateway", "app")  # made of the environment on first use
]


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_pinned_and_sorted(module: str) -> None:
    assert list(import_module(module).__all__) == PUBLIC[module]
    assert sorted(PUBLIC[module]) == PUBLIC[module]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_public_name_says_what_it_is_for(module: str, name: str) -> None:
    thing = getattr(import_module(module), name)
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        assert module != "tenure", f"tenure.{name} is a bare value"
        return
    assert thing.__module__.startswith("tenure")
    assert (thing.__doc__ or "").strip(), f"{module}.{name} has no docstring"
    assert not (thing.__doc__ or "").startswith(f"{name}("), f"{module}.{name}: write a docstring"


def test_the_version_is_the_one_in_the_project_file() -> None:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    assert tenure.__version__ == project["version"]
