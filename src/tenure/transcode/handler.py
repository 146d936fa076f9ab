"""One transcode attempt: fetch, process, upload, and remove the folder.

Each stage begins with a fenced report of type `stage`, which becomes the job's state. Progress
within a stage is `job.report(percent, stage)`. A report that raises `LeaseLost` ends the attempt:
ffmpeg is killed and nothing is published. The result lists the outputs by keys that contain this
claim's version. The fenced settle that stores the result publishes them.
"""

from __future__ import annotations

import asyncio
import hashlib
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tenure.core.lease import Lease
from tenure.core.outcome import Fatal, Retry, Snooze
from tenure.core.transcode import Output, Transcode
from tenure.egress import Client, Guard, GuardedProxy
from tenure.transcode import ffmpeg
from tenure.transcode.cage import (
    Cage,
    Ended,
    Limits,
    Workspace,
    find_cage,
    give_to_cage,
    take_from_cage,
)
from tenure.transcode.storage import (
    Access,
    Credentials,
    Mover,
    Refresh,
    TranscodeSettings,
    output_key,
    read_request,
)
from tenure.vault import CredentialStore, Vault, without_secrets

_STDERR_CHARS_MAX = 500
_DISK_WAIT_S = 60.0
_SLACK_BYTES = 2**20  # for blocks that are not full


class RunningJob(Protocol):
    """The part of the worker's `Job` that a transcode uses."""

    @property
    def id(self) -> str:
        """The job's id."""

    @property
    def payload(self) -> Any:
        """The decoded payload."""

    @property
    def lease(self) -> Lease:
        """The lease, whose fence is the claim's version."""

    def report(
        self,
        progress: Any = None,
        step: str = "",
        *,
        type: str = "progress",  # noqa: A002 - the name of the contracts
        data: Any = None,
    ) -> Awaitable[None]:
        """Publish progress; raises `LeaseLost` if this attempt has lost its lease."""


class FfmpegPlaces:
    """Places for `parallel` ffmpegs at once, of which each requester leaves one to the others.

    An ffmpeg may run for hours, so one place stays free for others even while none of them waits.
    A free place goes to the requester that holds the fewest, and among equals they take turns. A
    single place cannot be left to others; it goes to all in the order in which they came. Jobs
    without a requester may have all places.
    """

    def __init__(self, parallel: int) -> None:
        self._parallel = parallel
        self._held: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], str] = {}

    @asynccontextmanager
    async def place(self, requester: str) -> AsyncIterator[None]:
        """Wait for a place and hold it."""
        who = requester if self._parallel > 1 else ""
        given = asyncio.get_running_loop().create_future()
        self._waiting[given] = who
        self._give()
        try:
            await given
            yield
        finally:
            if self._waiting.pop(given, None) is None:  # also if it was given and cancelled at once
                self._held -= Counter([who])
                self._give()

    def _give(self) -> None:
        while self._held.total() < self._parallel:
            may = [
                given
                for given, who in self._waiting.items()
                if not given.done() and (not who or self._held[who] < self._parallel - 1)
            ]
            if not may:
                return
            given = min(may, key=lambda each: self._held[self._waiting[each]])
            who = self._waiting.pop(given)
            self._held[who] += 1
            given.set_result(None)
            for other in [each for each in self._waiting if self._waiting[each] == who]:
                self._waiting[other] = self._waiting.pop(other)  # behind the other requesters


@dataclass(slots=True)
class Transcoder:
    """Shared by all attempts of a worker; `start` before the first one, `close` at the end."""

    store: CredentialStore
    vault: Vault
    refresh: Refresh
    guard: Guard
    client: Client
    settings: TranscodeSettings = field(default_factory=TranscodeSettings)
    program: Path = field(init=False)
    cage: Cage = field(init=False)
    workspace: Workspace = field(init=False)
    places: FfmpegPlaces = field(init=False)

    async def start(self) -> Transcoder:
        """Find ffmpeg and its cage, and remove the folders of dead workers."""
        self.program = ffmpeg.locate_ffmpeg(self.settings.ffmpeg)
        chosen = self.settings
        self.cage = await asyncio.to_thread(
            find_cage, self.program, chosen.readable, chosen.required
        )
        self.workspace = Workspace(self.settings.work_folder).open()
        self.places = FfmpegPlaces(self.settings.parallel)
        return self

    def close(self) -> None:
        """Remove the folder of this process."""
        self.workspace.close()


def transcode_handler(shared: Transcoder) -> Callable[[RunningJob], Awaitable[dict[str, Any]]]:
    """The handler for the jobs of an inbox."""

    async def transcode(job: RunningJob) -> dict[str, Any]:
        request = read_request(job.payload)
        access = Access(job.lease, shared.store, shared.vault, shared.refresh)
        async with GuardedProxy(shared.guard) as proxy, shared.workspace.attempt() as folder:
            mover = Mover(shared.client, proxy, shared.settings)
            return await _Attempt(shared, job, request, access, mover, folder).run()

    return transcode


@dataclass(slots=True)
class _Attempt:
    shared: Transcoder
    job: RunningJob
    request: Transcode
    access: Access
    mover: Mover
    folder: Path
    _reported_s: float = 0.0

    async def run(self) -> dict[str, Any]:
        size = await self._fetch()
        probe = await self._process(size)
        outputs = await self._upload()
        return {
            "outputs": outputs,
            "source_bytes": size,
            "duration_s": probe.duration_s,
            "network": self.shared.cage.network,
        }

    async def _fetch(self) -> int:
        await self.job.report(0, "fetching", type="stage")
        file = self.folder / ffmpeg.INPUT

        async def fetch(credentials: Credentials) -> int:
            return await self.mover.fetch(
                self.request.source,
                credentials,
                file,
                check_room=self._check_room,
                on_progress=self._report_fetched,
            )

        return await self.access.use(fetch)

    def _check_room(self, size: int, fetched: int) -> None:
        needed = self.shared.settings.disk_needed_bytes(size, len(self.request.outputs)) - fetched
        if needed > self.shared.workspace.total_bytes():
            raise Fatal(
                f"this job needs {needed} bytes of disk, more than the worker has in all",
                code="source_too_large",
            )
        if needed > self.shared.workspace.free_bytes():
            raise Snooze(_DISK_WAIT_S, f"{needed} bytes of disk are not free at the moment")

    async def _process(self, size: int) -> ffmpeg.Probe:
        await self.job.report(0, "processing", type="stage")
        give_to_cage(self.folder)
        (self.folder / ffmpeg.INPUT).chmod(0o444)
        probe = await self._probe(size)
        for number, output in enumerate(self.request.outputs):
            await self._convert(output, probe, size, number)
        take_from_cage(self.folder)
        return probe

    async def _probe(self, size: int) -> ffmpeg.Probe:
        ended = await self._run(ffmpeg.probe_command(self.shared.program), size)
        probe = ffmpeg.read_probe(ended.stderr)
        if probe is None:
            raise Fatal(
                f"the source is no media file that may be read: {_end_of(ended.stderr)}",
                code="not_media",
            )
        return probe

    async def _convert(self, output: Output, probe: ffmpeg.Probe, size: int, number: int) -> None:
        if ffmpeg.wants_video(output) and not probe.has_video:
            raise Fatal(f"{output.name}: the source has no pictures", code="not_media")
        count = len(self.request.outputs)

        async def line(text: str) -> None:
            made_us = ffmpeg.progress_us(text)
            if made_us is not None and probe.duration_s:
                share = min(made_us / 1e6 / probe.duration_s, 1.0)
                await self._report_progress("processing", (number + share) / count)

        command = ffmpeg.convert_command(
            self.shared.program, output, probe, threads=self.shared.settings.threads
        )
        ended = await self._run(command, size, line)
        self._judge(output, ended, size)
        await self.job.report(round(100 * (number + 1) / count), "processing")

    async def _run(
        self, command: list[str], size: int, line: Callable[[str], Awaitable[None]] | None = None
    ) -> Ended:
        chosen = self.shared.settings
        outputs_bytes = len(self.request.outputs) * chosen.output_cap_bytes(size)
        limits = Limits(
            memory_bytes=chosen.memory_bytes_max,
            file_bytes=chosen.output_cap_bytes(size),
            cpu_s=chosen.cpu_s_max,
            wall_s=chosen.wall_s_max,
            threads=chosen.threads_max,
            folder_bytes=size + outputs_bytes + _SLACK_BYTES,
        )
        try:
            async with self.shared.places.place(self.job.lease.requester):
                return await self.shared.cage.run(
                    command, folder=self.folder, limits=limits, line=line
                )
        except TimeoutError:
            raise Fatal(
                f"ffmpeg took longer than {chosen.wall_s_max:g} s", code="ffmpeg_timeout"
            ) from None

    def _judge(self, output: Output, ended: Ended, size: int) -> None:
        made = _made_bytes(self.folder / output.name)
        cap = self.shared.settings.output_cap_bytes(size)
        if ended.hit_file_limit or made > cap:
            rule = "200 % of its source" if cap == 2 * size else f"{cap} bytes"
            raise Fatal(f"{output.name}: the output would exceed {rule}", code="output_too_large")
        if ended.code != 0:
            if "No space left" in ended.stderr:
                raise Retry(_DISK_WAIT_S, f"{output.name}: the disk is full", code="disk_full")
            reason = f"{output.name}: ffmpeg ended with {ended.code}: {_end_of(ended.stderr)}"
            raise Fatal(reason, code="ffmpeg_failed")
        if not made:
            raise Fatal(f"{output.name}: ffmpeg made nothing of it", code="ffmpeg_failed")

    async def _upload(self) -> list[dict[str, Any]]:
        await self.job.report(0, "uploading", type="stage")
        place, lease = self.request.destination, self.job.lease
        if lease.fence > 1:
            await self.access.use(
                lambda keys: self.mover.remove_older(place, keys, lease.job_id, lease.fence)
            )
        made: list[dict[str, Any]] = []
        try:
            for output in self.request.outputs:
                made.append(await self._upload_one(output))
                await self.job.report(
                    round(100 * len(made) / len(self.request.outputs)), "uploading"
                )
        except Exception:
            paths = [str(one["key"]) for one in made]
            await self.access.use(lambda keys: self.mover.remove(place, keys, paths))
            raise
        return made

    async def _upload_one(self, output: Output) -> dict[str, Any]:
        file = self.folder / output.name
        key = output_key(self.job.id, self.job.lease.fence, output.name)
        kind = ffmpeg.media_type(output)
        place = self.request.destination
        path = await self.access.use(lambda keys: self.mover.put(place, keys, key, file, kind))
        size, digest = await asyncio.to_thread(_measure, file)
        return {
            "name": output.name,
            "key": path,
            "bytes": size,
            "sha256": digest,
            "content_type": kind,
        }

    async def _report_fetched(self, done: int, total: int) -> None:
        await self._report_progress("fetching", done / total if total else 0.0)

    async def _report_progress(self, stage: str, share: float) -> None:
        """Report progress, at most once every `report_every_s`."""
        now_s = time.monotonic()
        if now_s - self._reported_s >= self.shared.settings.report_every_s:
            self._reported_s = now_s
            await self.job.report(min(round(100 * share), 99), stage)


def _made_bytes(file: Path) -> int:
    """The size of an output; 0 unless it is a regular file with a single link."""
    try:
        found = file.lstat()
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 else 0


def _measure(file: Path) -> tuple[int, str]:
    with file.open("rb") as source:
        return file.stat().st_size, hashlib.file_digest(source, "sha256").hexdigest()


def _end_of(stderr: str) -> str:
    """The end of ffmpeg's output, which contains the reason, and only local file names."""
    return without_secrets(stderr)[-_STDERR_CHARS_MAX:] or "it printed nothing"
