"""The OpenAPI document with every contract mounted: valid, and good enough to generate a client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from benchmarks.harness.environments import made_from
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.gateway.web import Web

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def binaries() -> Path:
    """The validator and the generator, in an environment of their own."""
    return made_from(HERE / "requirements.txt", "openapi")


@pytest.fixture
async def gateway(server: str, tmp_path: Path) -> AsyncGenerator[tuple[str, str]]:
    """The URL of a gateway that serves all five contracts, and a key for it."""
    inbox = f"inbox+sqlite:///{tmp_path}/jobs.db"
    ring = open_keyring(inbox)
    _, key = await ring.create(("admin",), "generated")
    await ring.close()
    queues = (
        f"streams+{server}?namespace=openapi:",
        f"bullmq+{server}?queue=openapi-b",
        f"omniq+{server}?queue=openapi-o",
        inbox,
        f"plane+sqlite:///{tmp_path}/jobs.db",
    )
    async with serving(GatewaySettings(queues=queues, port=0)) as running:
        yield running.url, key


@pytest.fixture
async def document(gateway: tuple[str, str], tmp_path: Path) -> Path:
    file = tmp_path / "openapi.json"
    file.write_bytes((await Web(gateway[0]).get("/openapi.json")).body)
    return file


async def ran(*words: str | Path, **environment: str) -> str:
    ended = await asyncio.to_thread(
        subprocess.run,
        [str(word) for word in words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-4_000:]
    return said


async def test_the_document_of_all_contracts_is_valid_openapi(
    document: Path, binaries: Path
) -> None:
    assert "OK" in await ran(binaries / "python", "-m", "openapi_spec_validator", document)
    schemas = json.loads(document.read_text())["components"]["schemas"]
    titles = [schema["title"] for schema in schemas.values()]
    assert len(set(titles)) == len(titles)
    assert list(schemas) == titles


@pytest.mark.timeout(240)
async def test_a_generated_client_submits_reads_claims_and_completes(
    gateway: tuple[str, str], document: Path, binaries: Path, tmp_path: Path
) -> None:
    made = tmp_path / "client"
    words = ("generate", "--path", document, "--output-path", made, "--fail-on-warning")
    path = f"{binaries}:{os.environ['PATH']}"
    await ran(binaries / "openapi-python-client", *words, PATH=path)
    driver = HERE / "driver.py"
    checked = ("-m", "mypy", "--config-file=", "--python-executable", binaries / "python")
    cache = ("--cache-dir", tmp_path / "mypy")
    await ran(sys.executable, *checked, *cache, driver, made / "tenure_client", MYPYPATH=str(made))
    await ran(binaries / "python", driver, *gateway, PYTHONPATH=str(made))
