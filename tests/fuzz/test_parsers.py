"""Parsers of what strangers send read it or raise the error that they name, and are quick."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from tenure.contracts.bullmq import schedulers
from tenure.core.errors import TenureError
from tenure.core.outcome import Fatal
from tenure.core.registry import parse_url
from tenure.dashboard import finder, search
from tenure.egress import EgressError
from tenure.egress.guard import read_target
from tenure.gateway import auth
from tenure.gateway.http import body as bodies
from tenure.gateway.problems import Problem
from tenure.store.redis.address import parse_address
from tenure.transcode.storage import read_request
from tenure.vault import read_ring
from tenure.webhooks import HEADERS, InvalidWebhook, check, new_secret, read_secret
from tests.fuzz.budget import REST, SECONDS, SEED, TIMEOUT_S
from tests.fuzz.junk import junk

TOO_SLOW_S = 1.0
SECRETS = [new_secret()]
JSON = msgspec.json.Decoder(dict[str, Any])


def webhook(text: str) -> None:
    """Its headers and body from the same junk, cut up."""
    parts = (text.split(",") * len(HEADERS))[: len(HEADERS)]
    check(text.encode(), dict(zip(HEADERS, parts, strict=True)), SECRETS, now_s=1.0)


def transcode(text: str) -> None:
    try:
        payload = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        payload = {"source": {"url": text}, "outputs": [text], "destination": text}
    read_request(payload)


# What reads, samples that it takes (junk is put into them), and what it may raise.
PARSERS: dict[str, tuple[Callable[[str], object], Sequence[str], tuple[type[Exception], ...]]] = {
    "cookie": (
        lambda text: auth._session_h({"cookie": text}),
        ["tenure_session=a-b; x=y"],
        (),
    ),
    "search": (
        lambda text: search.parse(text, now_ms=1),
        ["state:failed task:a* attempt>3 -is:stuck since:2h payload.a.b:c"],
        (TenureError,),
    ),
    "cursor": (finder._positions, ["eyJhIjp7fX0", "e30"], (TenureError,)),
    "cron": (
        lambda text: schedulers.next_after(text, 1, "UTC"),
        ["*/5 0 1,15 * 1-5", "0 0 29 2 *", "@weekly", "H H(0-7) * * L"],
        (TenureError,),
    ),
    "JSON": (
        lambda text: bodies.decode(JSON, text.encode(errors="surrogatepass")),
        ['{"a": [1, 2.5, "x"], "b": {"c": null}}'],
        (Problem,),
    ),
    "webhook": (webhook, ["v1=abc,1,nonce,id", '{"event_id": "e"}'], (InvalidWebhook,)),
    "secret": (read_secret, ["whsec_" + "QUFB" * 8], (ValueError,)),
    "target": (read_target, ["https://host.example:8443/a?b=c"], (EgressError,)),
    "queue URL": (parse_url, ["streams+redis://u:p@h:1/0?lease_ms=5"], (TenureError,)),
    "Redis URL": (parse_address, ["rediss://u:p@h:1/0?certfile=x"], (TenureError,)),
    "transcode": (
        transcode,
        ['{"source": {"url": "s3://a/b"}, "outputs": [{"name": "a.mp4", "format": "mp4"}]}'],
        (Fatal,),
    ),
    "key ring": (read_ring, ["k1:" + "QUFB" * 11], (TenureError, ValueError)),
}


def spoiled(rng: Random, samples: Sequence[str]) -> str:
    """Junk alone, or a sample in which some places are junk, cut or doubled."""
    if rng.random() < 0.3:
        return junk(rng).decode(errors="replace")
    text = rng.choice(samples)
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randint(0, len(text)), rng.choice((0, 0, 1, 3))
        piece = junk(rng).decode(errors="replace")
        new = rng.choice((piece, "", text[at : at + 9], chr(rng.randint(0, 0xD7FF))))
        text = text[:at] + new + text[at + length :]
    return text


@pytest.mark.timeout(TIMEOUT_S)
def test_parsers_read_what_they_get_or_raise_their_own_error_within_a_second() -> None:
    rng = Random(SEED)
    ends = time.monotonic() + SECONDS
    tries: Counter[str] = Counter()
    while time.monotonic() < ends:
        round_began = time.thread_time()
        for name, (parse, samples, allowed) in PARSERS.items():
            text = spoiled(rng, samples)
            began = time.thread_time()
            try:
                parse(text)
            except allowed:
                pass
            except Exception as error:
                pytest.fail(f"{name}: {type(error).__name__}: {error} for {text[:500]!r}")
            took = time.thread_time() - began
            assert took < TOO_SLOW_S, f"{name} took {took:.1f} s for {text[:500]!r}"
            tries[name] += 1
        time.sleep(REST * (time.thread_time() - round_began))
    print(dict(tries))
