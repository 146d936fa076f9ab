"""What the handlers here need of their job, which is less than the worker's `Job` offers."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol


class Running(Protocol):
    """One attempt at one job."""

    @property
    def payload(self) -> Any:
        """The decoded payload."""

    @property
    def attempt(self) -> int:
        """1 for the first start."""

    def report(
        self,
        progress: Any = None,
        step: str = "",
        *,
        type: str = "progress",  # noqa: A002 (the name is the event's own)
        data: Any = None,
    ) -> Awaitable[None]:
        """Publish news of this attempt."""
