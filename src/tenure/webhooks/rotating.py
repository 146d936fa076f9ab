"""Which of two live secrets signs the contract's header while one replaces the other.

A receiver that is written from the contract knows one secret and reads one signature. It may still
have the older secret, or the newer one already. The older one signs first, since receivers learn of
the newer one only after it was made; a receiver that refuses it gets the other one at once, and
from then on first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tenure.egress import Response

_REFUSED = (401, 403)
_RECEIVERS_MAX = 10_000

Send = Callable[[Sequence[bytes]], Awaitable[Response]]
"""Makes one request, signed by these keys; the first signs the contract's header."""


class Rotating:
    """What is known of receivers while two secrets of theirs are live."""

    def __init__(self) -> None:
        self._accepted: dict[str, bytes] = {}

    async def send(self, receiver: str, live: Sequence[bytes], send: Send) -> Response:
        """One answer; where a signature is refused and there is another one, that of the other."""
        if len(live) < 2:
            return await send(live)
        first = self._accepted.get(receiver, live[-1])
        keys = sorted(live, key=lambda key: key != first)
        answer = await send(keys)
        if answer.status in _REFUSED:
            keys.reverse()
            answer = await send(keys)
        if answer.status not in _REFUSED:
            if len(self._accepted) >= _RECEIVERS_MAX:
                self._accepted.clear()
            self._accepted[receiver] = keys[0]
        return answer
