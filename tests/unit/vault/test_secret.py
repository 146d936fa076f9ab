"""Secrets do not show themselves: not in logs, not in errors, not in encodings."""

from __future__ import annotations

import io
import json
import logging
import pickle
import traceback
from dataclasses import dataclass

import msgspec
import pytest
import structlog

from tenure.core.retry import failure_of
from tenure.vault import Binding, Sealed, Secret, Vault, new_kek, read_ring, without_secrets
from tenure.worker.telemetry import configure_logs

CANARY = "canary-7f3a-secret"


@dataclass
class Holder:
    name: str
    secret: Secret


@pytest.mark.clause("I-52")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_secret_reaches_no_log_line(as_json: bool) -> None:
    out = io.StringIO()
    before = structlog.get_config()
    configure_logs(level="debug", json=as_json, stream=out)
    log = structlog.get_logger("test")
    secret = Secret(CANARY)
    log.info("it is %s", secret, secret=secret, inside={"a": [secret]}, holder=Holder("x", secret))
    try:
        raise ValueError(f"bad: {secret} {secret!r} {Holder('y', secret)}")
    except ValueError:
        log.exception("failed")
    structlog.configure(**before)
    assert CANARY not in out.getvalue()
    assert "***" in out.getvalue()


@pytest.mark.clause("I-52")
def test_a_secret_reaches_no_standard_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("x").warning("%s %r %s", Secret(CANARY), Secret(CANARY), [Secret(CANARY)])
    assert CANARY not in caplog.text


@pytest.mark.clause("I-52")
def test_a_secret_cannot_be_encoded_or_pickled_by_mistake() -> None:
    for encode in (json.dumps, msgspec.json.encode, msgspec.msgpack.encode):
        with pytest.raises(TypeError) as caught:
            encode({"a": Secret(CANARY)})
        assert CANARY not in str(caught.value)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(Secret(CANARY))


@pytest.mark.clause("I-52")
async def test_no_failure_of_the_vault_holds_plaintext_or_keys() -> None:
    line = new_kek("k1")
    vault = Vault(read_ring(line))
    sealed = await vault.seal(Secret(CANARY), Binding("j", "r", 1))
    with pytest.raises(Exception, match=r"do(es)? not open") as caught:
        await vault.open(sealed, Binding("j", "r", 2))
    kept = failure_of(caught.value)
    said = kept.message + kept.stack + "".join(traceback.format_exception(caught.value))
    said += repr(sealed) + repr(vault.__dict__)
    assert CANARY not in said
    assert line.partition("=")[2] not in said
    assert (
        repr(Sealed(b"abcdefgh", b"ijklmnop", "k1")) == "Sealed(kek_id='k1', encryption_version=1)"
    )


@pytest.mark.clause("I-52")
def test_equal_secrets_are_equal_and_others_are_not() -> None:
    assert Secret("a") == Secret(b"a")
    assert hash(Secret("a")) == hash(Secret(b"a"))
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert not Secret("")


@pytest.mark.clause("I-52")
@pytest.mark.parametrize(
    "text",
    [
        f"GET https://h.example/a?X-Amz-Signature={CANARY}&b=1: 403",
        f"s3://{CANARY}:{CANARY}@bucket/key failed",
        f"<Error><Key>x</Key> see https://h.example/?sig={CANARY}</Error>",
        f"the key {CANARY} is unknown",
    ],
)
def test_text_for_keeping_is_freed_of_secrets(text: str) -> None:
    cleaned = without_secrets(text, [Secret(CANARY)])
    assert CANARY not in cleaned
    assert cleaned.split()[0]


@pytest.mark.clause("I-52")
def test_queries_are_hidden_even_when_nobody_knows_the_secret() -> None:
    cleaned = without_secrets(f"https://user:{CANARY}@h.example/p?token={CANARY} was refused")
    assert cleaned == "https://h.example/p?*** was refused"
