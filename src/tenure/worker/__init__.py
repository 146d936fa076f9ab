"""The one runtime: it leases jobs from any queue, runs their handlers and settles the leases.

It imports `core` only, so it cannot know which contract it serves. Start at `worker.worker`.
"""

from tenure.worker.config import Settings, identity
from tenure.worker.decorator import task
from tenure.worker.events import Health
from tenure.worker.job import Job
from tenure.worker.task import Call, Task
from tenure.worker.worker import Worker

__all__ = ["Call", "Health", "Job", "Settings", "Task", "Worker", "identity", "task"]
