"""What a receiver believes: fresh, genuine, first time; and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.webhooks import (
    InvalidWebhook,
    MemoryNonces,
    NonceStore,
    SqliteNonces,
    check,
    new_secret,
    read_secret,
    receiver,
    signed_headers,
    verify,
)

SECRET, OTHER = new_secret(), new_secret()
NOW = 1_700_000_000
BODY = json.dumps({"event_id": "e1", "seq": 4}).encode()


def headers(
    secret: str = SECRET, *, now_s: int = NOW, nonce: str = "n" * 24, body: bytes = BODY
) -> dict[str, str]:
    keys = [read_secret(secret)]
    return dict(signed_headers(keys, event_id="e1", body=body, now_s=now_s, nonce=nonce))


def reason_of(**changed: Any) -> str:
    given_ = {"body": BODY, "headers": headers(), "secrets": [SECRET], "now_s": NOW} | changed
    with pytest.raises(InvalidWebhook) as caught:
        check(**given_)
    return caught.value.reason


@pytest.fixture(params=["memory", "sqlite"])
async def nonces(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[NonceStore]:
    if request.param == "memory":
        yield MemoryNonces()
        return
    store = SqliteNonces(tmp_path / "nonces.db")
    yield store
    store.close()


@pytest.mark.clause("I-48")
async def test_a_genuine_delivery_is_verified(nonces: NonceStore) -> None:
    verified = await verify(BODY, headers(), [SECRET], nonces=nonces, now_s=NOW)
    assert (verified.event_id, verified.timestamp_s) == ("e1", NOW)
    assert verified.event["seq"] == 4


@pytest.mark.clause("I-48")
@pytest.mark.parametrize("away", [-300, 300])
def test_a_clock_may_be_five_minutes_off(away: int) -> None:
    assert check(BODY, headers(), [SECRET], now_s=NOW + away).event_id == "e1"


@pytest.mark.clause("I-48")
@pytest.mark.parametrize("away", [-301, 301, 86_400, -NOW])
def test_a_clock_further_off_is_refused(away: int) -> None:
    assert reason_of(now_s=NOW + away) == "timestamp"


@pytest.mark.clause("I-48")
async def test_a_delivery_counts_once(nonces: NonceStore) -> None:
    await verify(BODY, headers(), [SECRET], nonces=nonces, now_s=NOW)
    with pytest.raises(InvalidWebhook) as caught:
        await verify(BODY, headers(), [SECRET], nonces=nonces, now_s=NOW + 1)
    assert caught.value.reason == "replay"


@pytest.mark.clause("I-48")
async def test_a_stamp_from_the_future_does_not_outlive_its_nonce(nonces: NonceStore) -> None:
    """Kept for the skew alone, a nonce stamped +290 s could be played again after 310 s."""
    ahead = headers(now_s=NOW + 290)
    await verify(BODY, ahead, [SECRET], nonces=nonces, now_s=NOW)
    for later in (1, 299, 310, 500, 590):
        with pytest.raises(InvalidWebhook) as caught:
            await verify(BODY, ahead, [SECRET], nonces=nonces, now_s=NOW + later)
        assert caught.value.reason == "replay"
    with pytest.raises(InvalidWebhook) as caught:
        await verify(BODY, ahead, [SECRET], nonces=nonces, now_s=NOW + 591)
    assert caught.value.reason == "timestamp"


@pytest.mark.clause("I-48")
async def test_of_many_at_once_with_one_nonce_exactly_one_is_taken(nonces: NonceStore) -> None:
    taken = await asyncio.gather(*(nonces.take("n" * 24, now_s=NOW, keep_s=660) for _ in range(50)))
    assert sum(taken) == 1


@pytest.mark.clause("I-48")
async def test_a_forger_cannot_use_up_nonces(nonces: NonceStore) -> None:
    forged = headers(OTHER)
    with pytest.raises(InvalidWebhook):
        await verify(BODY, forged, [SECRET], nonces=nonces, now_s=NOW)
    assert (await verify(BODY, headers(), [SECRET], nonces=nonces, now_s=NOW)).event_id == "e1"


@pytest.mark.clause("I-48")
async def test_nonces_of_two_processes_are_one_memory(tmp_path: Path) -> None:
    one, two = SqliteNonces(tmp_path / "n.db"), SqliteNonces(tmp_path / "n.db")
    assert await one.take("n" * 24, now_s=NOW, keep_s=660)
    assert not await two.take("n" * 24, now_s=NOW, keep_s=660)
    assert await two.take("n" * 24, now_s=NOW + 661, keep_s=660)
    one.close()
    two.close()


@pytest.mark.clause("I-48")
@pytest.mark.parametrize("signed_with", [SECRET, OTHER], ids=["one", "other"])
def test_during_a_rotation_either_live_secret_verifies(signed_with: str) -> None:
    assert check(BODY, headers(signed_with), [SECRET, OTHER], now_s=NOW).event_id == "e1"


@pytest.mark.clause("I-48")
def test_a_sender_in_rotation_satisfies_receivers_with_the_old_or_the_new_secret() -> None:
    keys = [read_secret(OTHER), read_secret(SECRET)]
    made = dict(signed_headers(keys, event_id="e1", body=BODY, now_s=NOW, nonce="n" * 24))
    for known in (SECRET, OTHER):
        assert check(BODY, made, [known], now_s=NOW).event_id == "e1"


@pytest.mark.clause("I-48")
def test_a_secret_that_is_no_longer_live_verifies_nothing() -> None:
    assert reason_of(headers=headers(OTHER)) == "signature"


@pytest.mark.clause("I-48")
def test_the_event_id_of_the_header_must_be_that_of_the_body() -> None:
    """The header is not signed, so a thief could exchange it."""
    assert reason_of(headers=headers() | {"x-euterpe-event-id": "e2"}) == "event_id"


@pytest.mark.clause("I-48")
@pytest.mark.parametrize("body", [b"not json", b"[]", b"{}", b'{"event_id": 1}', b"\xff"])
def test_a_signed_body_that_is_no_event_is_refused(body: bytes) -> None:
    assert reason_of(body=body, headers=headers(body=body)) == "event_id"


@pytest.mark.clause("I-48")
@pytest.mark.parametrize("missing", range(4))
def test_every_one_of_the_four_headers_is_needed(missing: int) -> None:
    made = headers()
    made.pop(list(made)[missing])
    assert reason_of(headers=made) == "headers"


@pytest.mark.clause("I-48")
@pytest.mark.parametrize("nonce", ["a.b" * 10, "short", "ü" * 30, "n" * 65, "n" * 23 + "\n"])
def test_a_nonce_that_could_be_read_in_two_ways_is_refused(nonce: str) -> None:
    assert reason_of(headers=headers() | {"x-euterpe-nonce": nonce}) == "headers"


@pytest.mark.clause("I-48")
@pytest.mark.parametrize("stamp", ["", "1e9", "-5", " 1700000000", "\u0661\u0667\u0660", "9" * 13])
def test_a_timestamp_is_plain_digits(stamp: str) -> None:
    assert reason_of(headers=headers() | {"x-euterpe-timestamp": stamp}) == "headers"


@pytest.mark.clause("I-48")
def test_header_names_are_taken_in_any_case() -> None:
    shouted = {name.upper(): value for name, value in headers().items()}
    assert check(BODY, shouted, [SECRET], now_s=NOW).event_id == "e1"


@pytest.mark.clause("I-48")
@given(st.data())
def test_no_change_of_body_stamp_nonce_or_signature_is_believed(data: st.DataObject) -> None:
    made = headers()
    part = data.draw(st.sampled_from(["body", *list(made)[:3]]))
    if part == "body":
        body = data.draw(st.binary(max_size=200).filter(lambda other: other != BODY))
        assert reason_of(body=body) == "signature"
    else:
        other = data.draw(st.text(max_size=80).filter(lambda text: text != made[part]))
        if other.split(" ")[:8].count(made[part]):
            return
        assert reason_of(headers=made | {part: other}) in ("headers", "timestamp", "signature")


@pytest.mark.clause("I-48")
def test_comparisons_are_constant_time_and_cover_every_live_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted, not timed: a match at the first secret does not save the comparison with others."""
    compared: list[tuple[bytes, bytes]] = []
    real = receiver.hmac.compare_digest

    def counting(one: bytes, two: bytes) -> bool:
        compared.append((one, two))
        return real(one, two)

    monkeypatch.setattr(receiver.hmac, "compare_digest", counting)
    check(BODY, headers(), [SECRET, OTHER], now_s=NOW)
    assert len(compared) == 2


@pytest.mark.clause("I-48")
def test_without_secrets_nothing_is_verified() -> None:
    with pytest.raises(ValueError, match="at least one secret"):
        check(BODY, headers(), [], now_s=NOW)


@pytest.mark.clause("I-52")
def test_what_is_refused_is_told_without_secrets() -> None:
    with pytest.raises(InvalidWebhook) as caught:
        check(BODY, headers(OTHER), [SECRET], now_s=NOW)
    assert SECRET[6:] not in str(caught.value)
    assert headers()["x-euterpe-signature"] not in str(caught.value)
