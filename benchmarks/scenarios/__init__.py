"""One module a scenario, each with a `SCENARIO`."""

from __future__ import annotations

from importlib import import_module

from harness.scenario import Scenario

NAMES = (
    *("noop", "enqueue", "latency", "rss", "sse", "kill"),
    *("bullmq", "depth", "omniq", "inbox", "claims", "webhooks", "plane", "cluster"),
)
PIPELINE = ("pipeline_capture", "pipeline_audit", "pipeline_enqueue")
"""Need Spark, so `all` leaves them out."""


def load(name: str) -> Scenario:
    """The scenario of that name; its module is imported only now."""
    scenario: Scenario = import_module(f"scenarios.{name}").SCENARIO
    return scenario
