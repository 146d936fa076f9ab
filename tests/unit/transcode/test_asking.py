"""What a job may ask for, and what becomes of it on ffmpeg's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenure.core.outcome import Fatal
from tenure.core.transcode import Output
from tenure.transcode.ffmpeg import (
    FORMATS_READ,
    Probe,
    convert_command,
    probe_command,
    progress_us,
    read_probe,
)
from tenure.transcode.storage import GIB, TranscodeSettings, output_key, read_request

PROGRAM = Path("/usr/bin/ffmpeg")
BOTH = Probe(10.0, has_video=True, has_audio=True)


def asked(**changed: Any) -> dict[str, Any]:
    good = {
        "source": {"url": "s3://in/a.mov"},
        "destination": {"url": "s3://out/x"},
        "outputs": [{"name": "a.mp4", "format": "mp4"}],
    }
    return good | changed


@pytest.mark.parametrize(
    "changed",
    [
        {"outputs": []},
        {"outputs": [{"name": "a.mp4", "format": "mp4"}] * 2},
        {"outputs": [{"name": "../../etc/passwd", "format": "mp4"}]},
        {"outputs": [{"name": "-i", "format": "mp4"}]},
        {"outputs": [{"name": "a/b.mp4", "format": "mp4"}]},
        {"outputs": [{"name": "a.mp4", "format": "hls"}]},
        {"outputs": [{"name": "a.mp4", "format": "mp4", "height": 7}]},
        {"outputs": [{"name": "a.mp4", "format": "mp4", "video_kbps": -1}]},
        {"outputs": [{"name": "a.mp4", "format": "mp4", "filter": "movie=/etc/passwd"}]},
        {"source": {"url": "s3://in/a", "secret_access_key": "x"}},
        {"source": "s3://in/a"},
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_fetched(changed: dict[str, Any]) -> None:
    with pytest.raises(Fatal, match="no transcode job"):
        read_request(asked(**changed))


def test_a_good_request_is_read_into_its_type() -> None:
    request = read_request(asked())
    assert request.source.url == "s3://in/a.mov"
    assert request.outputs[0].format == "mp4"


@pytest.mark.parametrize("job_id", ["", "a/b", "..", "a b", "x" * 129, "ü"])
def test_a_strange_job_id_becomes_no_part_of_a_key(job_id: str) -> None:
    with pytest.raises(Fatal):
        output_key(job_id, 1, "a.mp4")


def test_every_command_reads_the_local_copy_by_the_file_protocol_alone() -> None:
    output = Output(name="a.mp4", format="mp4")
    for command in (
        probe_command(PROGRAM),
        convert_command(PROGRAM, output, BOTH, threads=2),
    ):
        inputs = [command[i + 1] for i, word in enumerate(command) if word == "-i"]
        assert inputs == ["file:input"]
        assert command[command.index("-protocol_whitelist") + 1] == "file"
        assert command.index("-protocol_whitelist") < command.index("-i")
        assert command[command.index("-format_whitelist") + 1] == FORMATS_READ


def test_no_format_that_points_to_other_files_is_read() -> None:
    pointing = {
        "hls",
        "dash",
        "concat",
        "image2",
        "sdp",
        "rtsp",
        "ffmetadata",
        "imf",
        "tedcaptions",
    }
    assert not pointing & set(FORMATS_READ.split(","))


def test_sizes_and_rates_reach_the_command_as_numbers() -> None:
    output = Output(name="a.mp4", format="mp4", height=720, video_kbps=1500, audio_kbps=96)
    command = convert_command(PROGRAM, output, BOTH, threads=3)
    assert "scale=-2:min(720\\,trunc(ih/2)*2)" in command
    assert command[command.index("-b:v") + 1] == "1500k"
    assert command[command.index("-b:a") + 1] == "96k"
    assert command[command.index("-threads") + 1] == "3"
    assert command[-1] == "file:a.mp4"


def test_a_source_without_sound_makes_an_output_without_sound() -> None:
    silent = Probe(10.0, has_video=True, has_audio=False)
    command = convert_command(PROGRAM, Output(name="a.mp4", format="mp4"), silent, threads=1)
    assert "-an" in command
    assert "-c:a" not in command


def test_what_is_no_media_file_has_no_probe() -> None:
    assert read_probe("file:input: Invalid data found when processing input") is None


@pytest.mark.parametrize("value", ["9" * 5_000, "9" * 400, "²", "--5", ""])
def test_a_number_that_no_ffmpeg_writes_is_no_progress_and_no_duration(value: str) -> None:
    """Who took ffmpeg over chooses what it writes."""
    assert progress_us(f"out_time_us={value}") is None
    said = f"Duration: {value}:00:00.00\n Stream #0:0: Video: h264"
    assert read_probe(said) == Probe(0.0, has_video=True, has_audio=False)


def test_an_output_may_double_a_source_of_more_than_a_gigabyte() -> None:
    settings = TranscodeSettings(output_bytes_max=7 * GIB)
    assert settings.output_cap_bytes(10**9) == 7 * GIB
    assert settings.output_cap_bytes(10**9 + 1) == 2 * 10**9 + 2


def test_the_disk_must_hold_the_copy_and_twice_its_size_for_each_output() -> None:
    settings = TranscodeSettings(disk_reserve_bytes=5)
    assert settings.disk_needed_bytes(100, 2) == 505
