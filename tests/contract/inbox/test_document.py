"""The inbox's part of the API document is true: schemathesis asks everything it describes."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tenure.cli.config import Config
from tenure.cli.keys import open_seal
from tenure.egress import Guard
from tenure.gateway.application import Gateway
from tenure.gateway.keys import MemoryKeyRing
from tenure.gateway.settings import GatewaySettings
from tenure.vault import new_kek
from tests.contract.gateway.threaded import served_in_a_thread

DOCUMENT = msgspec.json.decode(
    Gateway(
        GatewaySettings(queues=("inbox+sqlite:///never-opened.db",)), ring=MemoryKeyRing()
    ).openapi
)
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """A gateway with a key ring; schemathesis asks synchronously."""
    folder: Path = tmp_path_factory.mktemp("inbox")
    seal = open_seal(Config({"TENURE_VAULT_KEYS": new_kek("document")}, folder))
    lent = {"seal": seal, "check_url": Guard().check_url}
    queue = f"inbox+sqlite:///{folder}/jobs.db?synchronous=normal"
    # The limit of bodies is not in the schema, and a body that breaks two lengths may be beyond it.
    chosen = GatewaySettings(queues=(queue,), port=0, route_options=lent, body_bytes_max=4 << 20)
    with served_in_a_thread(chosen, ring=MemoryKeyRing()) as url:
        yield url


@pytest.mark.timeout(300)
@pytest.mark.clause("I-70")
@schema.include(path_regex="^/transcode").parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_every_operation_keeps_what_the_document_promises(
    case: schemathesis.Case, url: str
) -> None:
    """What URLs may be is not in the schema, so what fits it may yet be refused."""
    case.call_and_validate(base_url=url, timeout=20, excluded_checks=[positive_data_acceptance])
