"""Our worker as a program of its own, to be killed: `python -m tests.interop.bullmq.rival URL`."""

from __future__ import annotations

import sys

from tenure import Worker
from tenure.worker.config import Settings
from tests.interop.bullmq.ours import obey

if __name__ == "__main__":
    raise SystemExit(Worker([obey], queues=[sys.argv[1]], settings=Settings(concurrency=50)).run())
