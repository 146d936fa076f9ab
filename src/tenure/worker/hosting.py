"""What a worker asks of the process it has for itself: a fast loop and a calm garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def host(main: Coroutine[Any, Any, T], *, uvloop: bool) -> T:
    """Run `main` to its end, on uvloop where it is installed and wanted."""
    _calm_gc()
    with asyncio.Runner(loop_factory=_uvloop_factory() if uvloop else None) as runner:
        return runner.run(main)


def _calm_gc() -> None:
    """Thousands of short-lived attempts are no reason to search the whole heap for cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
