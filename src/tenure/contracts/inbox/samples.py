"""Samples for `tenure up`: a tiny clip is transcoded, and webhooks tell its receiver.

Inbox and outbox are two queues of one database. ffmpeg draws the clip once. The clip and its
outputs are in the one folder that `file://` may name. One job in ten has a source that is no clip
and fails for good.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import msgspec

from tenure.core.errors import UsageError
from tenure.core.job import NewJob
from tenure.samples import KEEP_MS, REQUESTER, SampleContext, SampleFlow, Stores, fill_queue

_NEEDS = ("cryptography", "httptools", "obstore")
_OUTPUTS_KEPT = 100
_DRAWN_WITHIN_S = 60.0
_DRAWING = ("-f", "lavfi", "-i", "testsrc=size=160x120:rate=10:duration=2", "-pix_fmt", "yuv420p")
_OUTPUTS = (
    {"name": "small.mp4", "format": "mp4", "height": 96, "video_kbps": 50},
    {"name": "poster.jpg", "format": "jpg"},
)


def _inbox_url(stores: Stores) -> str:
    """The inbox, which POST /transcode fills as well."""
    return f"inbox+{stores.database('inbox.db')}?keep_ms={KEEP_MS}"


def _outbox_url(stores: Stores) -> str:
    return f"{_inbox_url(stores)}&box=outbox"


def _hint(stores: Stores) -> str:
    if not stores.receiver_url:
        return ""
    return f"see webhooks    {stores.receiver_url}/ shows those of the transcodes, verified"


async def _produce(context: SampleContext) -> None:
    folder, receiver_url = context.stores.files, context.stores.receiver_url
    try:
        await asyncio.to_thread(draw_clip, context.locate_ffmpeg(), folder)
    except UsageError as error:
        context.say(f"no samples of transcoding: {error}")
        return

    def make(number: int) -> NewJob:
        _forget_old(folder / "out")
        return sample(number, folder, receiver_url)

    url = _inbox_url(context.stores)
    await fill_queue(context, url, make, waiting=["queued"], per_s=1 / 20, pause_s_max=30.0)


def sample(number: int, folder: Path, receiver_url: str) -> NewJob:
    """A transcode of the clip; every tenth of something else."""
    source = folder / ("no-clip.txt" if number % 10 == 9 else "clip.mp4")
    payload = {
        "source": {"url": source.as_uri()},
        "outputs": _OUTPUTS,
        "destination": {"url": (folder / "out").as_uri()},
    }
    return NewJob(
        task="transcode",
        payload=msgspec.json.encode(payload),
        requester=REQUESTER,
        max_attempts=3,
        options={"status_webhook_url": f"{receiver_url}/hooks"},
    )


def draw_clip(ffmpeg: Path, folder: Path) -> None:
    """Have ffmpeg draw a clip of two seconds, unless there is one; raises `UsageError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "no-clip.txt").write_text("Nothing to be seen here.\n")
    if (folder / "clip.mp4").exists():
        return
    draft = folder / f".clip.{os.getpid()}.mp4"
    command = [str(ffmpeg), "-nostdin", "-y", "-loglevel", "error", *_DRAWING, str(draft)]
    try:
        done = subprocess.run(  # nosec B603 # ffmpeg, as the transcoder finds it
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DRAWN_WITHIN_S,
            check=False,
        )
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()[-200:] or "no words"
            raise UsageError(f"ffmpeg drew no clip ({done.returncode}): {words}")
        draft.replace(folder / "clip.mp4")
    except subprocess.TimeoutExpired:
        raise UsageError(f"ffmpeg drew no clip within {_DRAWN_WITHIN_S:g} s") from None
    finally:
        draft.unlink(missing_ok=True)


def _forget_old(outputs: Path) -> None:
    """Remove the oldest outputs. Job ids begin with their time, so the first by name are oldest."""
    if outputs.is_dir():
        for old in sorted(outputs.iterdir())[:-_OUTPUTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


FLOWS = (
    SampleFlow(
        contract="inbox",
        rank=5,
        queue_url=_inbox_url,
        produce=_produce,
        hint=_hint,
        needs=_NEEDS,
    ),
    SampleFlow(contract="inbox", rank=6, queue_url=_outbox_url, needs=_NEEDS),
)
