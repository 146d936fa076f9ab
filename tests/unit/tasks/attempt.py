"""A running attempt as the handlers see it, keeping what they report."""

from __future__ import annotations

import time
from typing import Any


class Attempt:
    """Satisfies `tenure.tasks.model.RunningJob`."""

    def __init__(
        self, payload: Any, attempt: int = 1, report_error: Exception | None = None
    ) -> None:
        self.payload = payload
        self.attempt = attempt
        self.events: list[dict[str, Any]] = []
        self.times: list[float] = []
        self._report_error = report_error

    async def report(
        self,
        progress: Any = None,
        step: str = "",
        *,
        type: str = "progress",  # noqa: A002
        data: Any = None,
    ) -> None:
        if self._report_error:
            raise self._report_error
        self.times.append(time.monotonic())
        self.events.append({"type": type, "step": step, "progress": progress, "data": data})

    def text_of(self, kind: str) -> str:
        return "".join(event["data"]["text"] for event in self.events if event["type"] == kind)
