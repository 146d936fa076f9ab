"""The API document is true: schemathesis asks everything it describes, and then some."""

from __future__ import annotations

from collections.abc import Generator

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tenure.gateway.application import Gateway
from tenure.gateway.settings import GatewaySettings
from tenure.store.embedded import EmbeddedRedis
from tests.contract.gateway.threaded import served_in_a_thread

DOCUMENT = msgspec.json.decode(
    Gateway(GatewaySettings(queues=("streams+redis://127.0.0.1:6379/0",))).openapi
)
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def url(redis_server: EmbeddedRedis) -> Generator[str]:
    """A gateway; schemathesis asks synchronously."""
    queue = f"streams+{redis_server.url}?namespace=schema:&max_depth=0"
    with served_in_a_thread(GatewaySettings(queues=(queue,), port=0)) as url:
        yield url


@pytest.mark.timeout(300)
@pytest.mark.clause("S-49")
@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_every_operation_keeps_what_the_document_promises(
    case: schemathesis.Case, url: str
) -> None:
    case.call_and_validate(base_url=url, timeout=20)


def test_the_document_names_each_operation_once_and_describes_the_contract() -> None:
    operations = [
        operation["operationId"]
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
    ]
    assert len(operations) == len(set(operations))
    assert {"/v1/jobs", "/v1/jobs/{job_id}", "/v1/jobs/{job_id}/events"} <= DOCUMENT["paths"].keys()
    body = DOCUMENT["components"]["schemas"]["CreateJob"]
    assert body["properties"]["task"]["enum"] == ["chat", "code", "embed", "plan", "rag", "tool"]
    assert body["required"] == ["task", "payload"]
    assert body["additionalProperties"] is False
