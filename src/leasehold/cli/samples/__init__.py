"""The sample flows of `leasehold up`: one module a contract, listed in the table below.

A flow brings its queue's URL, handlers for its jobs, and a coroutine that feeds the queue until it
is cancelled. `leasehold up` serves all their queues with one worker; a new contract adds one module
and one line here.
"""

from __future__ import annotations

from leasehold.cli.samples import bullmq, omniq, streams
from leasehold.cli.samples.flow import Place, SampleFlow, Stores
from leasehold.worker.task import Task

__all__ = ["FLOWS", "Place", "SampleFlow", "Stores", "sample_tasks"]

FLOWS: tuple[SampleFlow, ...] = (streams.FLOW, bullmq.FLOW, omniq.FLOW)
"""The first one's queue is what the other commands speak to."""


def sample_tasks() -> list[Task]:
    """Handlers for the sample jobs of every contract, beyond the built-in tasks."""
    return [task for flow in FLOWS for task in flow.tasks]
