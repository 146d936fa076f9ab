"""Runs inside the peer's environment: the official client, asked in JSON lines.

driver.py serve PORT [SCRIPTS_DIR]        {"call": name, "arguments": {...}} a line
driver.py consume PORT QUEUE FILE         its consumer; every run appends the job's id to FILE
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import omniq


def told(value: Any) -> Any:
    """An answer as JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: told(each) for name, each in dataclasses.asdict(value).items()}
    if isinstance(value, list | tuple):
        return [told(each) for each in value]
    return value


def serve(client: Any) -> None:
    monitor = omniq.QueueMonitor(client) if hasattr(omniq, "QueueMonitor") else None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["call"].startswith("monitor."):
                method = getattr(monitor, asked["call"].removeprefix("monitor."))
            else:
                method = getattr(client, asked["call"])
            answer = {"ok": told(method(**asked["arguments"]))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def consume(client: Any, queue: str, path: str) -> None:
    def handler(ctx: Any) -> None:
        with open(path, "a") as file:  # noqa: PTH123
            file.write(f"{ctx.job_id}\n")

    client.consume(queue=queue, handler=handler, poll_interval_s=0.01)


if __name__ == "__main__":
    mode, port, *rest = sys.argv[1:]
    folder = {"scripts_dir": rest[0]} if mode == "serve" and rest else {}
    made = omniq.OmniqClient(host="127.0.0.1", port=int(port), **folder)
    if mode == "serve":
        serve(made)
    else:
        consume(made, *rest)
