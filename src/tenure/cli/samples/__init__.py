"""The sample flows of `tenure up`: one module a contract, listed in the table below.

A flow brings its queue's URL, handlers for its jobs, and a coroutine that feeds the queue until it
is cancelled (an outbox has none: its inbox fills it). `tenure up` serves all their queues with
one worker; a new contract adds one module and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure.cli.config import Config
from tenure.cli.samples import bullmq, inbox, omniq, plane, streams
from tenure.cli.samples.flow import Place, SampleFlow, Stores
from tenure.worker.task import Task

__all__ = ["FLOWS", "Place", "SampleFlow", "Stores", "sample_tasks", "usable_flows"]

FLOWS: tuple[SampleFlow, ...] = (
    streams.FLOW,
    bullmq.FLOW,
    omniq.FLOW,
    plane.FLOW,
    inbox.FLOW,
    inbox.OUTBOX,
)
"""The first one's queue is what the other commands speak to."""


def usable_flows(say: Callable[[str], None]) -> list[SampleFlow]:
    """All whose modules are installed; of the others it is said what they lack."""
    lacking = {flow.contract: flow.missing() for flow in FLOWS if flow.missing()}
    for contract, names in lacking.items():
        say(
            f"without {contract}: not installed are {', '.join(names)} "
            "(pip install 'tenure[transcode]')"
        )
    return [flow for flow in FLOWS if flow.contract not in lacking]


def sample_tasks(config: Config, urls: Sequence[str]) -> list[Task]:
    """Handlers for the sample jobs of every contract, beyond the built-in tasks."""
    ready = [task for flow in FLOWS for task in flow.tasks]
    made = [task for flow in FLOWS if flow.handlers for task in flow.handlers(config, urls)]
    return [*ready, *made]
