"""Tenure: background jobs for Python. One worker, one gateway, five queue contracts.

The public names are loaded when they are first used, so that a light command stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.client.client import Client
    from tenure.client.handle import Handle
    from tenure.core.errors import (
        Conflict,
        InvalidJob,
        InvalidResult,
        JobCancelled,
        JobFailed,
        LeaseLost,
        NotFound,
        NotReplicated,
        QueueFull,
        ReplyLost,
        StoreUnreachable,
        TenureError,
        Timeout,
    )
    from tenure.core.job import NewJob
    from tenure.core.outcome import Cancel, Fatal, Park, RateLimit, Retry, Snooze
    from tenure.core.registry import open_ledger, open_queue
    from tenure.core.retry import RetryPolicy, exponential, fixed
    from tenure.worker import Job, Worker, task
    from tenure.worker.settle import HandlerFailed
    from tenure.worker.telemetry import sentry_scope

__version__ = "0.1.0"

__all__ = [
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
]

_HOME = {
    "client.client": ("Client",),
    "client.handle": ("Handle",),
    "core.errors": (
        *("Conflict", "InvalidJob", "InvalidResult", "JobCancelled", "JobFailed", "LeaseLost"),
        *("NotFound", "NotReplicated", "QueueFull", "ReplyLost", "StoreUnreachable"),
        *("TenureError", "Timeout"),
    ),
    "core.job": ("NewJob",),
    "core.registry": ("open_ledger", "open_queue"),
    "core.outcome": ("Cancel", "Fatal", "Park", "RateLimit", "Retry", "Snooze"),
    "core.retry": ("RetryPolicy", "exponential", "fixed"),
    "worker": ("Job", "Worker", "task"),
    "worker.settle": ("HandlerFailed",),
    "worker.telemetry": ("sentry_scope",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tenure' has no attribute {name!r}")
    return getattr(import_module(f"tenure.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
