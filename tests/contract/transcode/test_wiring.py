"""`tenure.transcode` as the command line puts it together, on the real worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tenure import NewJob, Worker, open_ledger, open_queue
from tenure.cli.config import Config
from tenure.cli.handlers import default_concurrency, load_tasks, transcode_settings, with_slots
from tenure.core import registry
from tenure.core.errors import UsageError
from tenure.core.lease import Lease
from tenure.transcode import TranscodeSettings
from tenure.vault import Vault, new_kek, read_ring
from tenure.webhooks import new_secret
from tenure.webhooks.signing import read_secrets
from tests.contract.cli.test_documents import blocks_of
from tests.contract.transcode.bucket import S3Server
from tests.contract.transcode.conftest import KEY, Studio, ask, both
from tests.contract.webhooks.receiver import receiver

RING, SECRET = new_kek("k1"), new_secret()


class Addressed:
    """A queue whose leases say requester and URL, as those of an outbox do."""

    def __init__(self, queue: Any, url: str) -> None:
        self._queue = queue
        self._url = url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        leases = await self._queue.claim(limit, wait_ms=wait_ms)
        return [
            msgspec.structs.replace(one, requester="acme", webhook_url=self._url) for one in leases
        ]


@pytest.fixture
def contract(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract that has what the inbox has, found as `sealed://`."""
    known = registry.find_contract
    made = SimpleNamespace(
        parts={
            "credentials": lambda url: studio.store,
            "endpoint_secrets": lambda url, vault: read_secrets(f"other = {new_secret()}"),
        }
    )
    monkeypatch.setattr(
        registry, "find_contract", lambda name: made if name == "sealed" else known(name)
    )


def config(tmp_path: Path, **more: str) -> Config:
    environment = {
        "TENURE_VAULT_KEYS": RING,
        "TENURE_EGRESS_ALLOW": "127.0.0.1/32",
        "TENURE_TRANSCODE_FOLDER": str(tmp_path / "here"),
        "TENURE_WEBHOOKS_HEADERS": "standard",
        "TENURE_WEBHOOKS_SECRETS": f"acme = {new_secret()} {SECRET}",
    }
    return Config(environment | more, tmp_path)


@pytest.mark.clause("I-58")
@pytest.mark.usefixtures("contract")
async def test_the_worker_of_an_inbox_transcodes_and_delivers(
    s3: S3Server, studio: Studio, tmp_path: Path
) -> None:
    await studio.store.add(Vault(read_ring(RING)), "job-1", "acme", both(KEY))
    url = "memory://inbox-wiring"
    async with receiver([SECRET]) as there:
        tasks = load_tasks("tenure.transcode", config(tmp_path), urls=["sealed://x"])
        assert [one.name for one in tasks] == ["transcode", "webhook"]
        queue = open_queue(url)
        event = json.dumps({"event_id": "e1", "job_id": "job-1", "seq": 1}).encode()
        payload = json.dumps(ask(s3, {"name": "a.jpg", "format": "jpg"})).encode()
        await queue.submit(
            [
                NewJob(task="transcode", payload=payload, job_id="job-1"),
                NewJob(task="webhook", payload=event, job_id="e1"),
            ]
        )
        queues = [lambda: Addressed(open_queue(url), there.url)]
        await Worker(tasks, queues=queues, burst=True).serve()
    assert there.effects == {"e1": 1}
    assert there.heads[0]["webhook-id"] == "e1"
    done = await open_ledger(url).get("job-1")
    assert done is not None
    assert list(s3.objects("out")) == [json.loads(done.result)["outputs"][0]["key"]]
    assert [path.name[:5] for path in (tmp_path / "here").iterdir()] == ["boot-"]
    await queue.close()


@pytest.mark.usefixtures("contract")
async def test_without_a_key_ring_the_worker_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tenure keys new-kek"):
        load_tasks("tenure.transcode", Config({}, tmp_path), urls=["sealed://x"])
    with pytest.raises(UsageError, match="name the inbox"):
        load_tasks("tenure.transcode", config(tmp_path))


@pytest.mark.clause("I-58")
def test_an_inbox_worker_holds_five_transcodes_and_room_for_two_claims_of_events() -> None:
    assert (default_concurrency("tenure.transcode"), default_concurrency("app.py")) == (20, None)
    urls = [with_slots("inbox+sqlite:///a.db"), with_slots("inbox+sqlite:///a.db?box=outbox")]
    queues = [open_queue(url) for url in urls]
    assert [queue.features.slots_max for queue in queues] == [5, 15]
    assert with_slots("streams+redis://h/0") == "streams+redis://h/0"


def test_the_settings_reach_the_transcoder(tmp_path: Path) -> None:
    chosen = transcode_settings(
        config(
            tmp_path,
            TENURE_TRANSCODE_SOURCE_BYTES_MAX="1000",
            TENURE_TRANSCODE_REQUIRE="network,files",
            TENURE_TRANSCODE_MEMORY_BYTES_MAX="2000",
            TENURE_TRANSCODE_OUTPUT_BYTES_MAX="3000",
            TENURE_TRANSCODE_CPU_S_MAX="4",
            TENURE_TRANSCODE_WALL_S_MAX="5.5",
            TENURE_TRANSCODE_THREADS_MAX="6",
        )
    )
    assert chosen.work_folder == tmp_path / "here"
    assert (chosen.source_bytes_max, chosen.required) == (1_000, ("network", "files"))
    assert (chosen.memory_bytes_max, chosen.output_bytes_max) == (2_000, 3_000)
    assert (chosen.cpu_s_max, chosen.wall_s_max, chosen.threads_max) == (4, 5.5, 6)
    plain = transcode_settings(Config({}, tmp_path))
    assert plain == TranscodeSettings(), "the defaults are written in two places"


@pytest.mark.runs("docs/operating/isolation.md:toml")
def test_the_documented_settings_of_the_cage_are_read(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/operating/isolation.md", "toml")
    (tmp_path / "tenure.toml").write_text(block)
    chosen = transcode_settings(Config({}, tmp_path))
    assert chosen.required == ("network", "files", "syscalls")
    assert (chosen.memory_bytes_max, chosen.cpu_s_max) == (2**31, 3_600)


def test_a_worker_says_at_its_start_how_ffmpeg_is_caged(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tenure.cli", "worker", "tenure.transcode", "--burst"]
    environment = {
        "TENURE_VAULT_KEYS": new_kek("k1"),
        "TENURE_TRANSCODE_FOLDER": str(tmp_path / "work"),
        "TENURE_LOG_FORMAT": "text",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def said(url: str, **more: str) -> subprocess.CompletedProcess[str]:
        words = [*command, "--queue", url]
        seen = os.environ | environment | more
        return subprocess.run(
            words, env=seen, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    started = said(f"inbox+sqlite:///{tmp_path}/jobs.db")
    assert started.returncode == 0, started.stderr
    assert "ffmpeg is caged" in started.stderr + started.stdout
    refused = said(f"inbox+sqlite:///{tmp_path}/jobs.db", TENURE_TRANSCODE_REQUIRE="magic")
    assert refused.returncode == 2
    assert "'magic' is no part of the cage; there are network, files, syscalls" in refused.stderr
    outbox = said(
        f"inbox+sqlite:///{tmp_path}/jobs.db?box=outbox", TENURE_TRANSCODE_REQUIRE="magic"
    )
    assert outbox.returncode == 0, "who only delivers needs no ffmpeg"
