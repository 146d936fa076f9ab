"""The signature is pinned, and other people's libraries accept ours."""

from __future__ import annotations

import hashlib
import hmac
import time

import pytest
from standardwebhooks import Webhook

from tenure.webhooks import HEADERS, new_secret, read_secret, signed_headers
from tenure.webhooks.signing import NONCE_FORM, new_nonce, signature

BODY = b'{"event_id":"e1","seq":1}'


@pytest.mark.clause("I-47")
def test_the_signature_is_hmac_sha256_over_timestamp_nonce_and_raw_body() -> None:
    key, nonce = b"k" * 32, "n" * 24
    text = b"1700000000." + nonce.encode() + b"." + BODY
    expected = hmac.new(key, text, hashlib.sha256).hexdigest()
    assert signature(key, "1700000000", nonce, BODY) == expected


@pytest.mark.clause("I-47")
def test_an_attempt_carries_the_four_headers_of_the_contract() -> None:
    made = dict(signed_headers([b"k" * 32], event_id="e1", body=BODY, now_s=7, nonce="n" * 24))
    assert tuple(made) == HEADERS
    assert made["x-euterpe-event-id"] == "e1"
    assert made["x-euterpe-timestamp"] == "7"
    assert made["x-euterpe-signature"] == signature(b"k" * 32, "7", "n" * 24, BODY)


@pytest.mark.clause("I-47")
def test_two_live_secrets_make_one_signature_in_each_of_two_headers() -> None:
    keys = [b"new" * 8, b"old" * 8]
    made = dict(signed_headers(keys, event_id="e1", body=BODY, now_s=7, nonce="n" * 24))
    assert [made["x-euterpe-signature"], made["x-euterpe-signature-other"]] == [
        signature(key, "7", "n" * 24, BODY) for key in keys
    ]


@pytest.mark.clause("I-47")
def test_nonces_are_new_each_time_and_hold_no_dot() -> None:
    made = {new_nonce() for _ in range(1_000)}
    assert len(made) == 1_000
    assert all(NONCE_FORM.fullmatch(nonce) for nonce in made)


@pytest.mark.clause("I-47")
@pytest.mark.parametrize("which", [0, 1])
def test_a_standard_webhooks_receiver_accepts_us_with_either_live_secret(which: int) -> None:
    secrets = [new_secret(), new_secret()]
    made = signed_headers(
        [read_secret(one) for one in secrets],
        event_id="msg_1",
        body=BODY,
        now_s=int(time.time()),
        nonce=new_nonce(),
        standard=True,
    )
    assert Webhook(secrets[which]).verify(BODY, dict(made)) == {"event_id": "e1", "seq": 1}


@pytest.mark.clause("I-52")
@pytest.mark.parametrize("text", ["short", "whsec_QUJD", "whsec_*" * 9, ""])
def test_a_weak_or_garbled_secret_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ValueError, match=r"bytes|base64") as caught:
        read_secret(text)
    assert not text or text not in str(caught.value)
