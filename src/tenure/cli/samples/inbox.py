"""Sample jobs of the `inbox` contract: a tiny clip, transcoded, and webhooks that tell of it.

Inbox and outbox are two queues of one SQLite file. The clip is drawn by ffmpeg once; it and what is
made of it lie in the one folder that `file://` may name. One job in ten has a
source that is no clip: it fails for good, and its webhook says so.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tenure.cli.config import Config
from tenure.cli.samples.flow import Place, SampleFlow, Stores
from tenure.cli.samples.pace import keep_submitting
from tenure.core.errors import UsageError
from tenure.core.job import NewJob
from tenure.core.registry import open_ledger, open_queue
from tenure.worker.task import Task

TASK = "transcode"
REQUESTER = "tenure-samples"
NEEDS = ("cryptography", "httptools", "obstore")
_PER_S, _PAUSE_S_MAX = 1 / 20, 30.0
_KEEP_MS = 3_600_000
_OUTPUTS_KEPT = 100
_DRAWN_WITHIN_S = 60.0
_DRAWING = ("-f", "lavfi", "-i", "testsrc=size=160x120:rate=10:duration=2", "-pix_fmt", "yuv420p")
_OUTPUTS = (
    {"name": "small.mp4", "format": "mp4", "height": 96, "video_kbps": 50},
    {"name": "poster.jpg", "format": "jpg"},
)


def queue_url(stores: Stores) -> str:
    """The inbox, which POST /transcode fills as well."""
    return f"inbox+{stores.database('inbox.db')}?keep_ms={_KEEP_MS}"


def outbox_url(stores: Stores) -> str:
    """The events to be delivered, in the same file."""
    return f"{queue_url(stores)}&box=outbox"


def invitation(stores: Stores) -> str:
    """Where the webhooks are seen."""
    if not stores.receiver_url:
        return ""
    return f"see webhooks    {stores.receiver_url}/ shows those of the transcodes, verified"


def handlers(config: Config, urls: Sequence[str]) -> list[Task]:
    """The real ones: transcoding and delivering."""
    ours = [url for url in urls if url.startswith("inbox+")]
    if not ours:
        return []
    from tenure.cli.inbox_tasks import inbox_tasks

    return inbox_tasks(config, ours)


async def feed(place: Place) -> None:
    """Submit a transcode about every twenty seconds, and throw old outputs away."""
    folder = place.stores.files
    try:
        await draw_clip(folder)
    except UsageError as error:
        place.say(f"no samples of transcoding: {error}")
        return
    url = queue_url(place.stores)
    queue, ledger = open_queue(url, worker_id=REQUESTER), open_ledger(url)

    async def submit(number: int) -> None:
        await queue.submit([sample_job(number, folder, place.stores.receiver_url)])
        await asyncio.to_thread(_forget_old, folder / "out")

    async def waiting() -> int:
        return (await ledger.counts()).states["queued"]

    try:
        await keep_submitting(
            submit,
            waiting,
            per_s=_PER_S,
            chance=random.Random(),
            say=place.say,
            pause_s_max=_PAUSE_S_MAX,
        )
    finally:
        await queue.close()
        await ledger.close()


def sample_job(number: int, folder: Path, receiver_url: str) -> NewJob:
    """A transcode of the clip; every tenth of something else."""
    source = folder / ("no-clip.txt" if number % 10 == 9 else "clip.mp4")
    payload = {
        "source": {"url": source.as_uri()},
        "outputs": _OUTPUTS,
        "destination": {"url": (folder / "out").as_uri()},
    }
    return NewJob(
        task=TASK,
        payload=msgspec.json.encode(payload),
        requester=REQUESTER,
        max_attempts=3,
        options={"status_webhook_url": f"{receiver_url}/hooks"},
    )


async def draw_clip(folder: Path) -> None:
    """Have ffmpeg draw two small seconds, unless they are there; raises `UsageError`."""
    from tenure.transcode.ffmpeg import locate_ffmpeg

    program = locate_ffmpeg()
    if await asyncio.to_thread(_is_drawn, folder):
        return
    draft = folder / f".clip.{os.getpid()}.mp4"
    try:
        await _run([str(program), "-nostdin", "-y", "-loglevel", "error", *_DRAWING, str(draft)])
        draft.replace(folder / "clip.mp4")
    finally:
        draft.unlink(missing_ok=True)


def _is_drawn(folder: Path) -> bool:
    """Makes the folder and, at once, the source that is no clip."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "no-clip.txt").write_text("Nothing to be seen here.\n")
    return (folder / "clip.mp4").exists()


async def _run(command: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_DRAWN_WITHIN_S):
            _, said = await process.communicate()
    except TimeoutError:
        raise UsageError(f"ffmpeg drew no clip within {_DRAWN_WITHIN_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        words = said.decode(errors="replace").strip()[-200:] or "no words"
        raise UsageError(f"ffmpeg drew no clip ({process.returncode}): {words}")


def _forget_old(outputs: Path) -> None:
    """Job ids begin with their time: the first by name are the oldest."""
    if outputs.is_dir():
        for old in sorted(outputs.iterdir())[:-_OUTPUTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


FLOW = SampleFlow("inbox", queue_url, feed, invitation=invitation, handlers=handlers, needs=NEEDS)
OUTBOX = SampleFlow("inbox", outbox_url, needs=NEEDS)
