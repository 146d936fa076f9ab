"""The operator's file of signing secrets."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

import pytest

from tenure.core.errors import UsageError
from tenure.vault import Secret
from tenure.webhooks import new_secret, read_secret
from tenure.webhooks.signing import CachedSecrets, ChainedSecrets, live_keys, read_secrets

NEW, OLD, REST = new_secret(), new_secret(), new_secret()


@pytest.mark.clause("I-43")
async def test_a_requester_has_its_own_secrets_and_others_those_of_everybody() -> None:
    known = read_secrets(f"# ours\nacme = {NEW} {OLD}  # rotating\n\n* = {REST}\n")
    assert [one.reveal() for one in await known.live("acme")] == [
        read_secret(NEW),
        read_secret(OLD),
    ]
    assert [one.reveal() for one in await known.live("other")] == [read_secret(REST)]


@pytest.mark.clause("I-43")
async def test_the_first_place_that_knows_a_requester_counts() -> None:
    both = ChainedSecrets(read_secrets(f"acme = {NEW}"), read_secrets(f"acme = {OLD}\n* = {REST}"))
    assert await live_keys(both, "acme") == [read_secret(NEW)]
    assert await live_keys(both, "other") == [read_secret(REST)]
    assert await live_keys(ChainedSecrets(), "acme") == []


@pytest.mark.clause("I-43")
async def test_secrets_are_taken_as_they_were_given_to_the_requester() -> None:
    class Kept:
        async def live(self, requester_id: str) -> list[Secret]:
            return [Secret(NEW), Secret(b"\xff" * 32), Secret(OLD)]

    assert await live_keys(Kept(), "acme") == [read_secret(NEW), b"\xff" * 32]


@pytest.mark.clause("I-43")
@pytest.mark.parametrize("form", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_secret_may_be_written_in_either_alphabet_and_without_padding(
    form: Callable[[bytes], bytes],
) -> None:
    raw = b"\xfb\xff\xfe" * 10 + b"ab"
    text = "whsec_" + form(raw).decode()
    assert read_secret(text) == read_secret(text.rstrip("=")) == raw


@pytest.mark.clause("I-43")
async def test_without_a_line_for_everybody_a_stranger_has_none() -> None:
    assert await read_secrets(f"acme = {NEW}").live("other") == []
    assert await read_secrets("").live("acme") == []


@pytest.mark.clause("I-52")
@pytest.mark.parametrize(
    "text",
    [
        "acme",
        "acme =",
        f"= {NEW}",
        f"acme = {NEW} {OLD} {REST}",
        f"acme = {NEW}\nacme = {OLD}",
        "acme = canary-short",
        "acme = whsec_canary!",
    ],
    ids=["bare", "empty", "nobody", "three", "twice", "short", "garbled"],
)
def test_a_bad_line_is_named_by_its_number_and_not_shown(text: str) -> None:
    with pytest.raises(UsageError, match=r"line [12]:") as caught:
        read_secrets(text)
    assert "canary" not in str(caught.value)
    assert NEW not in str(caught.value)


class _Asked:
    """A place that counts how often it is asked, and answers when it is let."""

    def __init__(self) -> None:
        self.found = [Secret(NEW)]
        self.asked = 0
        self.fault: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def live(self, requester_id: str) -> list[Secret]:
        self.asked += 1
        await self.answers.wait()
        if self.fault is not None:
            raise self.fault
        return self.found


@pytest.mark.clause("I-43")
async def test_a_remembered_secret_is_asked_for_again_after_a_second() -> None:
    place, now_s = _Asked(), [100.0]
    remembered = CachedSecrets(place, clock=lambda: now_s[0])
    assert await live_keys(remembered, "acme") == [read_secret(NEW)]
    place.found = [Secret(OLD)]
    now_s[0] += 0.99
    assert await live_keys(remembered, "acme") == [read_secret(NEW)]
    assert place.asked == 1
    now_s[0] += 0.02
    assert await live_keys(remembered, "acme") == [read_secret(OLD)]


@pytest.mark.clause("I-43")
async def test_requesters_are_remembered_apart() -> None:
    both = read_secrets(f"acme = {NEW}\nother = {OLD}")
    remembered = CachedSecrets(both)
    for _ in range(2):
        assert await live_keys(remembered, "acme") == [read_secret(NEW)]
        assert await live_keys(remembered, "other") == [read_secret(OLD)]


@pytest.mark.clause("I-43")
async def test_deliveries_at_once_ask_once_and_one_that_is_ended_spoils_nothing() -> None:
    place = _Asked()
    place.answers.clear()
    remembered = CachedSecrets(place)
    ended, *others = [asyncio.create_task(remembered.live("acme")) for _ in range(5)]
    await asyncio.sleep(0)
    ended.cancel()
    place.answers.set()
    assert [len(found) for found in await asyncio.gather(*others)] == [1] * 4
    assert place.asked == 1
    assert ended.cancelled()


@pytest.mark.clause("I-43")
async def test_a_place_that_fails_is_asked_again_at_once() -> None:
    place = _Asked()
    place.fault = OSError("away")
    remembered = CachedSecrets(place)
    with pytest.raises(OSError, match="away"):
        await remembered.live("acme")
    place.fault = None
    assert await live_keys(remembered, "acme") == [read_secret(NEW)]
