"""The facts without which a figure means nothing: the machine, its load, the versions."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from harness.server import PrivateRedis


def facts(server: PrivateRedis) -> dict[str, str]:
    """Read once, before the first round."""
    one, five, fifteen = os.getloadavg()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": _named("/proc/cpuinfo", "model name"),
        "memory": f"{int(_named('/proc/meminfo', 'MemTotal').split()[0]) / 1e6:.1f} GB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "redis": server.version,
        "aof": server.aof,
        "load before (1, 5, 15 min)": f"{one:.2f} {five:.2f} {fifteen:.2f}",
    }


def _named(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"
