"""What a hostile source or endpoint can reach from here: nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tenure.core.outcome import Fatal
from tenure.egress import Policy
from tenure.transcode.cage import READABLE, Cage, Limits, find_cage
from tenure.transcode.ffmpeg import locate_ffmpeg
from tests.contract.egress.canary import canary
from tests.contract.transcode.bucket import S3Server
from tests.contract.transcode.conftest import KEY, Job, Studio, ask, both, keys
from tests.contract.transcode.test_limits import run_tool

LIMITS = Limits(memory_bytes=2**30, file_bytes=2**20, cpu_s=10, wall_s=30)

HOSTILE = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:{port}/a.ts\n",
    "hls of a file": "#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile 'http://127.0.0.1:{port}/a.mp4'\n",
    "concat of a file": "ffconcat version 1.0\nfile /etc/passwd\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static">'
    "<BaseURL>http://127.0.0.1:{port}/</BaseURL></MPD>",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    "m=video {port} RTP/AVP 96",
    "text": "just some words",
    "nothing": "",
}


@pytest.mark.clause("I-56")
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_playlist_dressed_as_a_clip_is_refused_and_fetches_nothing(
    s3: S3Server, studio: Studio, name: str
) -> None:
    async with canary() as bird:
        text = HOSTILE[name].replace("{port}", str(bird.port))
        (s3.folder / "in" / "clip.mp4").write_text(text)
        await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
        with pytest.raises(Fatal, match="no media file") as caught:
            await (await studio.handler())(Job(ask(s3)))
    assert bird.hits == 0
    assert "root:" not in str(caught.value)
    assert s3.objects("out") == {}


@pytest.mark.clause("I-56")
async def test_what_runs_in_the_cage_has_no_network(tmp_path: Path) -> None:
    """ffmpeg itself is asked to fetch; outside the cage it would."""
    cage = find_cage(locate_ffmpeg())
    assert cage.network == "none", f"this machine keeps the network: {cage.lacks}"
    async with canary() as bird:
        command = [str(locate_ffmpeg()), "-nostdin", "-i", f"http://127.0.0.1:{bird.port}/a.mp4"]
        caged = await cage.run(command, folder=tmp_path, limits=LIMITS)
        assert (caged.code != 0, bird.hits) == (True, 0)
        loose = await Cage("shared").run(command, folder=tmp_path, limits=LIMITS)
        assert (loose.code != 0, bird.hits) == (True, 1)


@pytest.mark.clause("I-56")
async def test_what_runs_in_the_cage_is_nobody_and_sees_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENURE_CANARY", "canary-in-the-environment")
    cage = replace(find_cage(locate_ffmpeg()), readable=(*READABLE, "/proc"))
    _, lines = await run_tool(cage, tmp_path, LIMITS, "cat", "/proc/self/status")
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    user = "65534" if os.geteuid() == 0 else str(os.geteuid())
    assert set(status["Uid"]) <= {user, "65534"}, "an unmapped user is shown as nobody"
    assert status["NoNewPrivs"] == ["1"]
    if os.geteuid() == 0:
        assert status["Groups"] == []
        assert int(status["CapEff"][0], 16) == 0
    _, shown = await run_tool(cage, tmp_path, LIMITS, "env")
    assert sorted(line.partition("=")[0] for line in shown) == ["LANG", "PATH"]


@pytest.mark.clause("I-56")
async def test_the_result_says_whether_ffmpeg_had_a_network(s3: S3Server, studio: Studio) -> None:
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    assert (await (await studio.handler())(Job(ask(s3))))["network"] == "none"


@pytest.mark.clause("I-53")
@pytest.mark.parametrize("which", ["source", "destination"])
async def test_a_storage_endpoint_inside_our_network_is_never_reached(
    s3: S3Server, studio: Studio, which: str
) -> None:
    studio.policy = Policy(allow=(f"127.0.0.1:{s3.port}",))
    await studio.store.add(studio.vault, "job-1", "acme", both(KEY))
    async with canary() as bird:
        payload = ask(s3, {"name": "a.jpg", "format": "jpg"})
        payload[which]["endpoint"] = f"http://127.0.0.1:{bird.port}"
        with pytest.raises(Fatal, match=f"{which}: .*127.0.0.1:{bird.port}"):
            await (await studio.handler())(Job(payload))
    assert bird.hits == 0


@pytest.mark.clause("I-53")
async def test_a_signed_url_inside_our_network_is_never_reached(studio: Studio) -> None:
    studio.policy = Policy()
    async with canary() as bird:
        given = {"source": {"signed_url": f"http://127.0.0.1:{bird.port}/x?sig=canary"}}
        await studio.store.add(studio.vault, "job-1", "acme", given)
        payload = {"source": {}, "outputs": [{"name": "a.jpg", "format": "jpg"}]}
        with pytest.raises(Fatal, match="source") as caught:
            await (await studio.handler())(Job(payload))
    assert bird.hits == 0
    assert "canary" not in str(caught.value)


@pytest.mark.clause("I-57")
async def test_credentials_of_this_machine_are_used_for_nobody(
    s3: S3Server, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's own keys are good here; a job without credentials must not profit by them."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY[0],
        "AWS_SECRET_ACCESS_KEY": KEY[1],
        "AWS_SESSION_TOKEN": "canary-session",
        "AWS_ENDPOINT": s3.endpoint,
        "AWS_ENDPOINT_URL": s3.endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    await studio.store.add(studio.vault, "job-1", "acme", None)
    with pytest.raises(Fatal):
        await (await studio.handler())(Job(ask(s3)))


@pytest.mark.clause("I-57")
async def test_no_session_token_of_this_machine_travels_with_a_jobs_keys(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.contract.egress.scripted import scripted

    monkeypatch.setenv("AWS_SESSION_TOKEN", "canary-session")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "canary-id")
    missing = b"HTTP/1.1 404 -\r\nContent-Length: 0\r\n\r\n"
    async with scripted(lambda head, body: missing) as server:
        await studio.store.add(studio.vault, "job-1", "acme", {"source": keys(KEY)})
        payload = {
            "source": {"url": "s3://in/x", "endpoint": f"http://127.0.0.1:{server.port}"},
            "outputs": [{"name": "a.jpg", "format": "jpg"}],
        }
        with pytest.raises(Fatal, match="no such object"):
            await (await studio.handler())(Job(payload))
    assert server.heads
    assert b"canary" not in b"".join(server.heads)
    assert KEY[0].encode() in server.heads[0]
    assert b"proxy-" not in server.heads[0].lower(), "the proxy's password stays here"
