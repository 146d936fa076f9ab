"""Real clips through real ffmpeg, from and to an S3 server that checks signatures."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from tenure.core.errors import LeaseLost
from tenure.core.outcome import Fatal
from tenure.transcode.ffmpeg import locate_ffmpeg, read_probe
from tests.contract.transcode.bucket import S3Server
from tests.contract.transcode.conftest import KEY, Job, Studio, ask, both, make_clip


def seen_by_ffmpeg(file: Path) -> str:
    command = [str(locate_ffmpeg()), "-hide_banner", "-nostdin", "-i", str(file)]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.clause("I-55", "I-57")
async def test_a_clip_is_fetched_processed_uploaded_and_cleaned_up(
    s3: S3Server, studio: Studio
) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    job = Job(ask(s3))
    result = await (await studio.handler())(job)
    assert job.stages == ["fetching", "processing", "uploading"]
    (output,) = result["outputs"]
    assert output["key"] == "films/job-1/v1/small.mp4"
    file = s3.folder / "out" / output["key"]
    assert output["bytes"] == file.stat().st_size
    assert output["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    said = seen_by_ffmpeg(file)
    assert "160x120" in said
    assert read_probe(said) is not None
    assert studio.leftovers() == []


@pytest.mark.clause("I-57")
async def test_progress_comes_from_ffmpeg_and_rises_to_a_hundred(
    s3: S3Server, studio: Studio
) -> None:
    make_clip(s3.folder / "in" / "long.mp4", "testsrc=duration=20:size=640x480:rate=25")
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    job = Job(ask(s3, {"name": "a.mp4", "format": "mp4"}, source="s3://in/long.mp4"))
    await (await studio.handler())(job)
    shares = [percent for percent, stage in job.reports if stage == "processing"]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 100)
    assert any(0 < share < 100 for share in shares), "some of it was seen in between"


@pytest.mark.clause("I-57")
@pytest.mark.parametrize(
    ("form", "codec"),
    [
        ("mp4", "Video: h264"),
        ("webm", "Video: vp9"),
        ("m4a", "Audio: aac"),
        ("mp3", "Audio: mp3"),
        ("ogg", "Audio: opus"),
        ("wav", "Audio: pcm_s16le"),
        ("jpg", "Video: mjpeg"),
    ],
)
async def test_every_format_that_is_offered_can_be_made(
    s3: S3Server, studio: Studio, form: str, codec: str
) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    job = Job(ask(s3, {"name": f"a.{form}", "format": form, "audio_kbps": 64}))
    result = await (await studio.handler())(job)
    assert codec in seen_by_ffmpeg(s3.folder / "out" / result["outputs"][0]["key"])


@pytest.mark.clause("I-55")
async def test_a_claim_lost_in_the_middle_publishes_nothing_and_leaves_nothing(
    s3: S3Server, studio: Studio
) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))

    def lose(stage: str, percent: object) -> None:
        if stage == "uploading":
            raise LeaseLost("job-1")

    with pytest.raises(LeaseLost):
        await (await studio.handler())(Job(ask(s3), hook=lose))
    assert s3.objects("out") == {}
    assert studio.leftovers() == []


@pytest.mark.clause("I-55")
async def test_a_stale_worker_writes_beside_and_never_over_its_successor(
    s3: S3Server, studio: Studio
) -> None:
    """The successor sweeps what earlier claims left; the keys differ by the claim's version."""
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    handler = await studio.handler()
    first = await handler(Job(ask(s3), fence=1))
    studio.store.reclaim("job-1")
    second = await handler(Job(ask(s3), fence=2))
    assert first["outputs"][0]["key"] != second["outputs"][0]["key"]
    assert list(s3.objects("out")) == ["films/job-1/v2/small.mp4"]


@pytest.mark.clause("I-55")
async def test_a_stale_worker_gets_no_credentials(s3: S3Server, studio: Studio) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    studio.store.reclaim("job-1")
    with pytest.raises(LeaseLost):
        await (await studio.handler())(Job(ask(s3), fence=1))
    assert s3.objects("out") == {}


@pytest.mark.clause("I-55")
async def test_a_failed_attempt_takes_back_what_it_had_uploaded(
    s3: S3Server, studio: Studio
) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    seen: list[object] = []

    def fail(stage: str, percent: object) -> None:
        if stage == "uploading" and percent == 50:
            seen.append(dict(s3.objects("out")))
            raise RuntimeError("something else broke")

    two = [{"name": f"{n}.jpg", "format": "jpg"} for n in "ab"]
    with pytest.raises(RuntimeError):
        await (await studio.handler())(Job(ask(s3, *two), hook=fail))
    assert seen
    assert s3.objects("out") == {}


@pytest.mark.clause("I-57")
async def test_a_source_that_is_not_there_ends_the_job(s3: S3Server, studio: Studio) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    with pytest.raises(Fatal, match="no such object"):
        await (await studio.handler())(Job(ask(s3, source="s3://in/nothing.mp4")))


@pytest.mark.clause("I-57")
async def test_a_source_without_pictures_makes_no_film(s3: S3Server, studio: Studio) -> None:
    make_clip(s3.folder / "in" / "tone.wav", "sine=frequency=440:duration=1")
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    handler = await studio.handler()
    with pytest.raises(Fatal, match="no pictures"):
        await handler(Job(ask(s3, source="s3://in/tone.wav")))
    tone = {"name": "a.mp3", "format": "mp3"}
    assert (await handler(Job(ask(s3, tone, source="s3://in/tone.wav"))))["outputs"]


@pytest.mark.clause("I-57")
async def test_a_local_folder_serves_only_what_lies_within_it(
    studio: Studio, clip: Path, tmp_path: Path
) -> None:
    root = tmp_path / "media"
    root.mkdir()
    (root / "clip.mp4").write_bytes(clip.read_bytes())
    (root / "way-out").symlink_to(tmp_path)
    await studio.store.add(studio.vault, "job-1", "acme", None)
    payload = {
        "source": {"url": f"file://{root}/clip.mp4"},
        "destination": {"url": f"file://{root}/made"},
        "outputs": [{"name": "a.jpg", "format": "jpg"}],
    }
    handler = await studio.handler(local_root=root)
    result = await handler(Job(payload))
    assert (root / result["outputs"][0]["key"]).stat().st_size == result["outputs"][0]["bytes"]
    for outside in (f"file://{root}/../jobs.db", f"file://{root}/way-out/jobs.db", "file:///etc/x"):
        with pytest.raises(Fatal, match="outside"):
            await handler(Job(payload | {"source": {"url": outside}}))
    with pytest.raises(Fatal, match="not permitted"):
        await (await studio.handler())(Job(payload))


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(
    "endpoint", ["file:///etc", "file://localhost/etc/passwd", "FILE:///x", "unix:///run/x", "x"]
)
async def test_an_endpoint_that_is_no_web_address_is_a_clear_refusal(
    studio: Studio, scheme: str, endpoint: str
) -> None:
    """The storage client's thread would panic over it, and the job be tried again."""
    await studio.store.add(studio.vault, "job-1", "acme", None)
    place = {"url": f"{scheme}://bucket/key", "endpoint": endpoint, "account": "a"}
    outputs = [{"name": "a.jpg", "format": "jpg"}]
    payload = {"source": place, "destination": place, "outputs": outputs}
    with pytest.raises(Fatal, match="an endpoint is an http or https URL with a host") as raised:
        await (await studio.handler())(Job(payload))
    assert raised.value.code == "address_refused"
