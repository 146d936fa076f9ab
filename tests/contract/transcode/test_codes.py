"""A failure of storage has one code, whether it was reached by keys or by a signed URL."""

from __future__ import annotations

from typing import Any

import pytest

from tenure.core.outcome import Fatal, Retry, Signal
from tests.contract.egress.scripted import scripted
from tests.contract.transcode.conftest import KEY, Job, Studio, keys
from tests.ports import free_port


def answered(status: int) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status


async def failing(studio: Studio, port: int, *, signed: bool) -> Signal:
    """How the attempt ends whose source is at this port."""
    origin = f"http://127.0.0.1:{port}"
    source = {"signed_url": f"{origin}/in/clip.mp4?sig=x"} if signed else keys(KEY)
    name = "signed" if signed else "keys"
    await studio.store.add(studio.vault, name, "acme", {"source": source})
    payload: dict[str, Any] = {
        "source": {"url": "s3://in/clip.mp4", "endpoint": origin},
        "destination": {"url": "s3://out/films", "endpoint": origin},
        "outputs": [{"name": "a.jpg", "format": "jpg"}],
    }
    with pytest.raises(Signal) as caught:
        await (await studio.handler())(Job(payload, id=name))
    return caught.value


@pytest.mark.clause("I-74")
@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Fatal), (404, Fatal), (409, Retry), (423, Retry), (429, Retry), (503, Retry)],
)
async def test_a_status_has_the_same_code_by_keys_and_by_a_signed_url(
    studio: Studio, status: int, kind: type[Signal]
) -> None:
    async with scripted(lambda head, body: answered(status)) as server:
        both = [await failing(studio, server.port, signed=signed) for signed in (False, True)]
    assert [type(one) for one in both] == [kind, kind]
    assert [one.code for one in both] == [f"http_{status}"] * 2


@pytest.mark.clause("I-74")
async def test_a_storage_that_is_away_has_the_same_code_by_keys_and_by_a_signed_url(
    studio: Studio,
) -> None:
    port = free_port()
    both = [await failing(studio, port, signed=signed) for signed in (False, True)]
    assert [(type(one), one.code) for one in both] == [(Retry, "unreachable")] * 2
