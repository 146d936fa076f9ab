"""The plane's part of the API document is true: schemathesis asks everything it describes."""

from __future__ import annotations

from collections.abc import Generator

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tenure.gateway.application import Gateway
from tenure.gateway.keys import MemoryKeyRing
from tenure.gateway.settings import GatewaySettings
from tests.contract.gateway.threaded import served_in_a_thread

DOCUMENT = msgspec.json.decode(
    Gateway(
        GatewaySettings(queues=("plane+sqlite:///never-opened.db",)), ring=MemoryKeyRing()
    ).openapi
)
WAIT_MS_MAX, HOUR_MS = 50, 3_600_000
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """A gateway; schemathesis asks synchronously."""
    queue = f"plane+sqlite:///{tmp_path_factory.mktemp('plane')}/plane.db?synchronous=normal"
    settings = GatewaySettings(queues=(queue,), port=0)
    with served_in_a_thread(settings, ring=MemoryKeyRing()) as url:
        yield url


@pytest.mark.timeout(300)
@pytest.mark.clause("P-22")
@schema.include(path_regex="^/(internal|v1)/").parametrize()
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_every_operation_keeps_what_the_document_promises(
    case: schemathesis.Case, url: str
) -> None:
    """Names of streams and attempts are not in the schema, so what fits it may yet be refused."""
    body = case.body
    asked = body.get("max_wait_ms") if isinstance(body, dict) else None
    if isinstance(asked, int) and WAIT_MS_MAX < asked <= HOUR_MS:  # what is longer is refused
        body["max_wait_ms"] = WAIT_MS_MAX
    case.call_and_validate(base_url=url, timeout=20, excluded_checks=[positive_data_acceptance])


def test_the_document_describes_the_verbs() -> None:
    verbs = {f"/internal/worker/{name}" for name in ("claim", "heartbeat", "complete", "fail")}
    assert verbs <= DOCUMENT["paths"].keys()
