"""Spark's own parent of Python workers, with everything they need already imported.

Spark forks a Python process for each task and each planning step. What the parent has imported
costs its children nothing; else each of them would spend a second on it. For where there is no
`fork_server`.
"""

from __future__ import annotations

from importlib import import_module

from pyspark.daemon import manager

from tenure.pipeline.fork_server import PRELOADED

if __name__ == "__main__":
    for name in PRELOADED:
        import_module(name)
    manager()
