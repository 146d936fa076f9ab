"""A generated clip, a bucket that checks signatures, and a transcoder with all its real parts."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tenure.core.lease import Lease
from tenure.core.outcome import Fatal
from tenure.egress import Client, Guard, Policy
from tenure.transcode import Transcoder, TranscodeSettings, transcode_handler
from tenure.transcode.ffmpeg import locate_ffmpeg
from tenure.transcode.storage import Refresh
from tenure.vault import StoredCredentials, Vault, new_kek, read_ring
from tests.contract.transcode.bucket import S3Server
from tests.contract.vault.credentials import Credentials

KEY = ("AKIDOLD", "canary-old-secret")
FRESH = ("AKIDNEW", "canary-new-secret")


def make_clip(file: Path, *inputs: str, seconds: float = 2, more: tuple[str, ...] = ()) -> None:
    sources = inputs or (
        f"testsrc=duration={seconds}:size=320x240:rate=25",
        f"sine=frequency=440:duration={seconds}",
    )
    words = [word for source in sources for word in ("-f", "lavfi", "-i", source)]
    command = [str(locate_ffmpeg()), "-nostdin", "-loglevel", "error", *words, *more, "-y"]
    subprocess.run([*command, str(file)], check=True)


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("clip") / "clip.mp4"
    make_clip(file)
    return file


@pytest.fixture
def s3(tmp_path: Path, clip: Path) -> Iterator[S3Server]:
    folder = tmp_path / "s3"
    for bucket in ("in", "out"):
        (folder / bucket).mkdir(parents=True)
    (folder / "in" / "clip.mp4").write_bytes(clip.read_bytes())
    server = S3Server(folder)
    server.start(KEY)
    yield server
    server.stop()


def keys(pair: tuple[str, str]) -> dict[str, str]:
    return {"access_key_id": pair[0], "secret_access_key": pair[1]}


def both(pair: tuple[str, str]) -> dict[str, dict[str, str]]:
    return {"source": keys(pair), "destination": keys(pair)}


def ask(s3: S3Server, *outputs: dict[str, Any], source: str = "s3://in/clip.mp4") -> dict[str, Any]:
    return {
        "source": {"url": source, "endpoint": s3.endpoint},
        "destination": {"url": "s3://out/films", "endpoint": s3.endpoint},
        "outputs": list(outputs) or [{"name": "small.mp4", "format": "mp4", "height": 120}],
    }


@dataclass
class Job:
    """An attempt as the worker hands it to a handler; `hook` sees every report."""

    payload: Any
    id: str = "job-1"
    fence: int = 1
    requester: str = ""
    reports: list[tuple[Any, str]] = field(default_factory=list)
    hook: Callable[[str, Any], None] = lambda stage, percent: None

    @property
    def lease(self) -> Lease:
        return Lease(
            job_id=self.id,
            queue="inbox",
            task="transcode",
            payload=b"{}",
            attempt=1,
            max_attempts=3,
            fence=self.fence,
            token="",
            lease_until_ms=0,
            lease_ms=15_000,
            requester=self.requester,
        )

    async def report(
        self,
        progress: Any = None,
        step: str = "",
        *,
        type: str = "progress",  # noqa: A002 - the worker's own word for it
        data: Any = None,
    ) -> None:
        self.hook(step, progress)
        self.reports.append((progress, step))

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(stage for _, stage in self.reports))


async def no_refresh(lease: Lease, version: int) -> StoredCredentials:
    raise Fatal("nobody refreshes here")


@dataclass
class Studio:
    """The transcoder with its store, its vault and its folder."""

    folder: Path
    store: Credentials
    vault: Vault
    policy: Policy
    settings: TranscodeSettings
    refresh: Refresh = no_refresh
    made: list[Transcoder] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    async def handler(self, **settings: Any) -> Callable[[Any], Awaitable[dict[str, Any]]]:
        guard = Guard(self.policy)
        client = Client(guard)
        self.clients.append(client)
        shared = Transcoder(
            store=self.store,
            vault=self.vault,
            refresh=self.refresh,
            guard=guard,
            client=client,
            settings=replace(self.settings, **settings),
        )
        self.made.append(await shared.start())
        return transcode_handler(shared)

    def leftovers(self) -> list[str]:
        """Files of attempts that are still there."""
        return [str(path) for path in self.folder.rglob("*") if path.name != ".lock"][1:]


@pytest.fixture
async def studio(tmp_path: Path) -> AsyncIterator[Studio]:
    store = Credentials(tmp_path / "jobs.db")
    work = tmp_path / "work"
    made = Studio(
        work,
        store,
        Vault(read_ring(new_kek("k1"))),
        Policy(allow=("127.0.0.1/32",)),
        TranscodeSettings(work_folder=work, disk_reserve_bytes=0, report_every_s=0.0, threads=1),
    )
    yield made
    for shared in made.made:
        shared.close()
    for client in made.clients:
        await client.close()
    await store.close()
