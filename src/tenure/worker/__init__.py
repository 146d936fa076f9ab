"""The one runtime: it leases jobs from any queue, runs their handlers and settles the leases.

It imports `core` only, so it cannot know which contract it serves. Start reading at `runtime`.
"""

from tenure.worker.config import Settings
from tenure.worker.identity import identity
from tenure.worker.job import Job
from tenure.worker.runtime import Health, Worker
from tenure.worker.task import Task, task

__all__ = ["Health", "Job", "Settings", "Task", "Worker", "identity", "task"]
