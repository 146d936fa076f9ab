"""The one runtime: it leases jobs from any queue, runs their handlers and settles the leases.

It imports `core` only, so it cannot know which contract it serves. Start reading at `runtime`.
"""

from leasehold.worker.config import Settings
from leasehold.worker.identity import identity
from leasehold.worker.job import Job
from leasehold.worker.runtime import Health, Worker
from leasehold.worker.task import Task, task

__all__ = ["Health", "Job", "Settings", "Task", "Worker", "identity", "task"]
