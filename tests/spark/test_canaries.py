"""Secrets of a transcode request, each a canary: the captured lake has none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tenure import Worker
from tenure.cli.config import Config
from tenure.cli.handlers import load_tasks
from tenure.cli.keys import open_seal
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.pipeline.capture import capture
from tenure.vault import new_kek
from tenure.webhooks import new_secret
from tests.contract.gateway.web import Web
from tests.ports import free_port
from tests.spark.working import journal_of, lake_rows

CANARY = "canary4c19"
KEYS = {"access_key_id": f"AKID{CANARY}", "secret_access_key": f"{CANARY}secret"}


def request(origin: str) -> dict[str, Any]:
    return {
        "source": {"url": f"{origin}/clip.mp4?X-Amz-Signature={CANARY}signature"},
        "destination": {"url": "s3://out/films", "endpoint": origin},
        "outputs": [{"name": "poster.jpg", "format": "jpg"}],
        "credentials": {"destination": KEYS},
        "status_webhook_url": f"{origin}/hook",
        "max_attempts": 1,
    }


@pytest.mark.clause("I-71")
async def test_no_secret_of_a_request_is_captured_into_the_lake(
    spark: SparkSession, lake: str, tmp_path: Path
) -> None:
    url, origin = f"inbox+sqlite:///{tmp_path}/jobs.db", f"http://127.0.0.1:{free_port()}"
    told = {
        "TENURE_VAULT_KEYS": new_kek("lake"),
        "TENURE_EGRESS_ALLOW": "127.0.0.1/32",
        "TENURE_TRANSCODE_FOLDER": str(tmp_path / "work"),
        "TENURE_WEBHOOKS_SECRETS": f"* = {new_secret()}",
    }
    config = Config(told, tmp_path)
    lent = {"seal": open_seal(config), "has_secret": lambda requester: True}
    async with serving(GatewaySettings(queues=(url,), port=0, route_options=lent)) as running:
        made = await Web(running.url).post("/transcode", request(origin))
    assert made.status == 202, made.body
    outbox = f"{url}?box=outbox"
    tasks = load_tasks("tenure.transcode", config, urls=[url])
    await Worker(tasks, queues=[url, outbox], burst=True).serve()
    assert [event.to_state for event in await journal_of(url)][-1] == "dead_letter"
    capture(spark, lake, [url, outbox], once=True)
    rows = lake_rows(lake)
    assert made.json["job_id"] in {row["job_id"] for row in rows}
    files = [file.read_bytes() for file in Path(lake).rglob("*") if file.is_file()]
    assert files
    for kept in (json.dumps(rows, default=str).encode(), *files):
        assert CANARY.encode() not in kept
