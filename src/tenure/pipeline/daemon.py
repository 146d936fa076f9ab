"""Spark's daemon that forks Python workers, with their imports done beforehand.

Spark forks a Python process for each task and each planning step. The children share what the
daemon has imported; else each of them would spend a second on it. Used where there is no
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
