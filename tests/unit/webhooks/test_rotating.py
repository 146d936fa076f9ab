"""Which of two live secrets signs first, and what follows from a refusal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tenure.egress import Response
from tenure.webhooks.signing import KeyRotation

NEW, OLD = b"new" * 8, b"old" * 8

pytestmark = pytest.mark.clause("I-47")


class Receiver:
    """Knows one secret, and reads the contract's header alone."""

    def __init__(self, secret: bytes, status: int = 204) -> None:
        self.secret = secret
        self.status = status
        self.seen: list[bytes] = []

    async def __call__(self, keys: Sequence[bytes]) -> Response:
        self.seen.append(keys[0])
        status = self.status if keys[0] == self.secret else 401
        return Response(status=status, headers={}, body=b"", truncated=False)


async def test_the_older_secret_signs_until_a_receiver_refuses_it() -> None:
    rotating = KeyRotation()
    before, after = Receiver(OLD), Receiver(NEW)
    for _ in range(2):
        assert (await rotating.send("before", [NEW, OLD], before)).status == 204
        assert (await rotating.send("after", [NEW, OLD], after)).status == 204
    assert before.seen == [OLD, OLD]
    assert after.seen == [OLD, NEW, NEW]


async def test_a_receiver_that_refuses_both_is_asked_twice_and_not_more() -> None:
    stranger = Receiver(b"another")
    assert (await KeyRotation().send("x", [NEW, OLD], stranger)).status == 401
    assert stranger.seen == [OLD, NEW]


async def test_one_secret_is_sent_once_whatever_the_answer() -> None:
    stranger = Receiver(b"another")
    assert (await KeyRotation().send("x", [NEW], stranger)).status == 401
    assert stranger.seen == [NEW]
