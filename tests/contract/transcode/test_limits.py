"""Sizes, disks and times: what is too much ends early, and in words."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenure.core.outcome import Fatal, Snooze
from tenure.transcode.cage import READABLE, Cage, Ended, Limits, find_cage
from tenure.transcode.ffmpeg import locate_ffmpeg
from tests.contract.egress.scripted import scripted
from tests.contract.transcode.bucket import S3Server
from tests.contract.transcode.conftest import KEY, Job, Studio, ask, both, make_clip

WAV = {"name": "a.wav", "format": "wav"}


@pytest.mark.clause("I-54")
async def test_an_output_over_two_hundred_percent_is_stopped_while_it_is_written(
    s3: S3Server, studio: Studio, clip: Path
) -> None:
    """The rule is for sources over 1 GB; here for those over 1 kB. Sound as WAV grows tenfold."""
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    biggest = 0

    def watch(stage: str, percent: object) -> None:
        nonlocal biggest
        sizes = [path.stat().st_size for path in studio.folder.rglob("a.wav")]
        biggest = max([biggest, *sizes])

    handler = await studio.handler(doubling_from_bytes=1_000)
    with pytest.raises(Fatal, match=r"a\.wav: the output would exceed 200 % of its source"):
        await handler(Job(ask(s3, WAV), hook=watch))
    assert biggest <= 2 * clip.stat().st_size
    assert s3.objects("out") == {}
    assert studio.leftovers() == []
    small = await handler(Job(ask(s3, {"name": "a.mp3", "format": "mp3", "audio_kbps": 32})))
    assert small["outputs"][0]["bytes"] <= 2 * clip.stat().st_size


@pytest.mark.clause("I-54")
async def test_a_small_source_has_a_limit_of_its_own(s3: S3Server, studio: Studio) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    with pytest.raises(Fatal, match="would exceed 50000 bytes"):
        await (await studio.handler(output_bytes_max=50_000))(Job(ask(s3, WAV)))


@pytest.mark.clause("I-54")
async def test_a_source_over_the_limit_is_not_fetched(s3: S3Server, studio: Studio) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    with pytest.raises(Fatal, match="this worker takes 1000"):
        await (await studio.handler(source_bytes_max=1_000))(Job(ask(s3)))
    assert studio.leftovers() == []


@pytest.mark.clause("I-54")
async def test_a_source_that_lies_about_its_size_is_cut_off(studio: Studio) -> None:
    """No length is announced, and it does not end."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    flood = head + b"10000\r\n%s\r\n" % (b"x" * 0x10000) * 64
    async with scripted(lambda _head, _body: flood) as server:
        await studio.store.add(studio.vault, "job-1", "acme", None)
        payload = {
            "source": {"url": f"http://127.0.0.1:{server.port}/endless"},
            "outputs": [WAV],
        }
        with pytest.raises(Fatal, match="goes on after 1000000 bytes"):
            await (await studio.handler(source_bytes_max=1_000_000))(Job(payload))
    assert studio.leftovers() == []


@pytest.mark.clause("I-54")
async def test_without_room_on_the_disk_the_job_waits_and_spends_no_attempt(
    s3: S3Server, studio: Studio
) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    found = os.statvfs(studio.folder.parent)
    # More than is free, and less than there is: other programs change what is free meanwhile.
    reserve = (found.f_bavail + found.f_blocks) // 2 * found.f_frsize
    with pytest.raises(Snooze, match="not free at the moment"):
        await (await studio.handler(disk_reserve_bytes=reserve))(Job(ask(s3)))
    assert studio.leftovers() == []


@pytest.mark.clause("I-54")
async def test_what_is_fetched_already_is_not_asked_of_the_disk_again(
    studio: Studio, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No size is announced; there is room for the copy and one output of twice its size."""
    body = clip.read_bytes()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with scripted(lambda _head, _body: answer) as server:
        given = {"destination": {"signed_urls": {"a.jpg": f"http://127.0.0.1:{server.port}/put"}}}
        await studio.store.add(studio.vault, "job-1", "acme", given)
        payload = {
            "source": {"url": f"http://127.0.0.1:{server.port}/clip"},
            "outputs": [{"name": "a.jpg", "format": "jpg"}],
        }
        handler = await studio.handler()
        space = studio.made[0].workspace
        monkeypatch.setattr(space, "free_bytes", lambda: 2 * len(body))
        assert (await handler(Job(payload)))["outputs"]
        monkeypatch.setattr(space, "free_bytes", lambda: 2 * len(body) - 1)
        with pytest.raises(Snooze):
            await handler(Job(payload))
    assert studio.leftovers() == []


@pytest.mark.clause("I-54")
async def test_a_job_that_no_disk_of_this_worker_can_hold_is_refused(
    s3: S3Server, studio: Studio
) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    found = os.statvfs(studio.folder.parent)
    total = found.f_blocks * found.f_frsize
    with pytest.raises(Fatal, match="more than the worker has in all"):
        await (await studio.handler(disk_reserve_bytes=total))(Job(ask(s3)))


@pytest.mark.clause("I-55")
async def test_a_cancelled_attempt_kills_ffmpeg_and_removes_its_folder(
    s3: S3Server, studio: Studio
) -> None:
    long = "testsrc=duration=8:size=1280x720:rate=30"
    fast = ("-c:v", "mpeg4", "-q:v", "9")
    await asyncio.to_thread(make_clip, s3.folder / "in" / "long.mp4", long, more=fast)
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    running = asyncio.Event()

    def started(stage: str, percent: object) -> None:
        if stage == "processing":
            running.set()

    slow = {"name": "a.webm", "format": "webm"}
    job = Job(ask(s3, slow, source="s3://in/long.mp4"), hook=started)
    work = asyncio.create_task((await studio.handler())(job))
    await running.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert studio.leftovers() == []
    assert processes_in(studio.folder) == []


def processes_in(folder: Path) -> list[str]:
    """Programs whose current folder lies below this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(folder) in str((entry / "cwd").readlink()):
                    found.append(entry.name)
            except OSError:
                continue
    return found


@pytest.mark.clause("I-56")
async def test_ffmpeg_that_takes_too_long_is_ended(s3: S3Server, studio: Studio) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    with pytest.raises(Fatal, match=r"took longer than 0\.001 s"):
        await (await studio.handler(wall_s_max=0.001))(Job(ask(s3)))
    assert processes_in(studio.folder) == []


@pytest.mark.clause("I-56")
async def test_no_more_ffmpegs_run_at_once_than_permitted(
    s3: S3Server, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = 0, 0
    real = Cage.run

    async def counted(*args: Any, **kwargs: Any) -> Ended:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await real(*args, **kwargs)
        finally:
            running -= 1

    monkeypatch.setattr(Cage, "run", counted)
    handler = await studio.handler(parallel=2)
    picture = {"name": "a.jpg", "format": "jpg"}
    jobs = [Job(ask(s3, picture), id=f"job-{number}") for number in range(6)]
    for job in jobs:
        await studio.store.add(studio.vault, job.id, "acme", both(KEY))
    await asyncio.gather(*(handler(job) for job in jobs))
    assert most == 2
    assert len(s3.objects("out")) == 6


async def test_long_transcodes_of_one_requester_leave_a_place_to_another(
    s3: S3Server, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hangs, ends = Cage.run, asyncio.Event(), asyncio.Event()

    async def hanging(cage: Cage, command: list[str], **kwargs: Any) -> Ended:
        if any("long.jpg" in word for word in command):
            hangs.set()
            await ends.wait()
        return await real(cage, command, **kwargs)

    monkeypatch.setattr(Cage, "run", hanging)
    handler = await studio.handler(parallel=2)
    long, short = ({"name": name, "format": "jpg"} for name in ("long.jpg", "short.jpg"))
    theirs = [Job(ask(s3, long), id=f"long-{number}", requester="a") for number in range(4)]
    mine = Job(ask(s3, short), id="short", requester="b")
    for job in (*theirs, mine):
        await studio.store.add(studio.vault, job.id, "acme", both(KEY))
    async with asyncio.TaskGroup() as running:
        for job in theirs:
            running.create_task(handler(job))
        await hangs.wait()
        async with asyncio.timeout(30):
            assert (await handler(mine))["outputs"]
        ends.set()
    assert len(s3.objects("out")) == 5


@pytest.mark.clause("I-56")
async def test_memory_and_cpu_limits_hold_for_what_runs_in_the_cage(tmp_path: Path) -> None:
    cage = replace(find_cage(locate_ffmpeg()), readable=(*READABLE, "/proc"))
    limits = Limits(memory_bytes=2**28, file_bytes=1_000, cpu_s=1, wall_s=30)
    _, lines = await run_tool(cage, tmp_path, limits, "cat", "/proc/self/limits")
    soft = {line[:26].strip(): line[26:].split()[0] for line in lines}
    assert soft["Max address space"] == str(2**28)
    assert soft["Max file size"] == "1000"
    assert (soft["Max cpu time"], soft["Max core file size"]) == ("1", "0")
    patient = replace(limits, cpu_s=60)  # where memory is slow, it eats for long
    eats, _ = await run_tool(cage, tmp_path, patient, "tail", "/dev/zero")
    assert eats.code != 0
    assert "memory" in eats.stderr
    spins, _ = await run_tool(cage, tmp_path, limits, "sh", "-c", "while :; do :; done")
    assert spins.code < 0


async def run_tool(
    cage: Cage, folder: Path, limits: Limits, *command: str
) -> tuple[Ended, list[str]]:
    """Run a program of the system in the cage; how it ended, and its lines."""
    lines: list[str] = []

    async def take(line: str) -> None:
        lines.append(line)

    program = shutil.which(command[0])
    assert program, f"this machine has no {command[0]}"
    argv = [program, *command[1:]]
    return await cage.run(argv, folder=folder, limits=limits, line=take), lines
