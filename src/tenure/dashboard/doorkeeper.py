"""What the dashboard asks of whoever guards the gateway."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request

from tenure.core.endpoint import Caller


class Doorkeeper(Protocol):
    """Knows keys and sessions; the dashboard knows neither."""

    async def caller(self, request: Request) -> Caller | None:
        """Who asks for this page; None for somebody who has to sign in first.

        Raises what the gateway answers to a request that comes from another site's page.
        """

    async def sign_in(self, key_text: str, request: Request) -> str | None:
        """The session that a key opens, as a Set-Cookie value; None for a key that is no good."""

    async def is_still_in(self, request: Request, caller: Caller) -> bool:
        """Whether the caller of an earlier request would be admitted now."""

    async def sign_out(self, request: Request) -> str:
        """End the session of a request; the Set-Cookie value that takes its place.

        Raises what the gateway answers to a request that comes from another site's page.
        """
