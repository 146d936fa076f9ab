"""What other programs stored reaches the handler as it is, on every Redis contract."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from tenure.contracts.omniq.consume import Exec, context_of
from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.worker.job import read_payload
from tests.contract.adapters import Servers

URLS = {
    "streams": "streams+{}?namespace=foreign{}:",
    "bullmq": "bullmq+{}?queue=foreign{}",
    "omniq": "omniq+{}?queue=foreign{}",
}
FIELD = {"streams": "payload", "bullmq": "data", "omniq": "payload"}


@pytest.mark.parametrize("contract", URLS)
async def test_half_a_surrogate_pair_in_a_stored_payload_is_a_value(
    servers: Servers, contract: str
) -> None:
    server = servers.redis()
    queue: Any = open_queue(URLS[contract].format(server, os.getpid()), worker_id="w")
    await queue.submit([NewJob(task="t", payload=b'{"text":"here"}', job_id="foreign")])
    parts = urlsplit(server)
    raw = redis.Redis(host=parts.hostname or "localhost", port=parts.port or 6379)
    (key,) = [
        each
        for each in raw.scan_iter(f"*foreign{os.getpid()}*", count=1_000, _type="hash")
        if raw.hget(each, FIELD[contract]) == b'{"text":"here"}'
    ]
    raw.hset(key, FIELD[contract], rb'{"text":"\ud800"}')
    if contract == "streams":  # there the entry carries it too
        stream = f"foreign{os.getpid()}:jobs:stream"
        ((entry, fields),) = raw.xrange(stream)
        raw.xadd(stream, {**fields, b"payload": rb'{"text":"\ud800"}'})
        raw.xdel(stream, entry)
    raw.close()
    (lease,) = await queue.claim(1, wait_ms=1_000)
    tools = Exec(None, lease.job_id)
    read = context_of(lease, tools).payload if contract == "omniq" else read_payload(lease.payload)
    assert read == {"text": chr(0xD800)}
    await queue.close()
