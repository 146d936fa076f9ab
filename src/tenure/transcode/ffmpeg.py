"""Finds ffmpeg, builds its command lines, and reads its output.

ffmpeg reads only the local copy: `file` is the only permitted protocol, and only formats that
cannot refer to other files are opened. A playlist or concat script named clip.mp4 is refused.
User input reaches the command line only as numbers and as rows of a table.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tenure.core.errors import UsageError
from tenure.core.transcode import FormatName, Output

INPUT = "input"

# Containers and raw streams. No hls, dash, concat, image2 or sdp: they refer to other files.
FORMATS_READ = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,mxf,ogg,wav,w64,mp3,"
    "aac,ac3,eac3,flac,aiff,caf,amr,h264,hevc,ivf,dv,rm,gif,wtv"
)


@dataclass(frozen=True, slots=True)
class _Format:
    muxer: str
    media_type: str
    video: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


_FORMATS: dict[FormatName, _Format] = {
    "mp4": _Format(
        "mp4",
        "video/mp4",
        ("libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p"),
        ("aac",),
        ("-movflags", "+faststart"),
    ),
    "webm": _Format(
        "webm",
        "video/webm",
        ("libvpx-vp9", "-deadline", "good", "-cpu-used", "4", "-row-mt", "1"),
        ("libopus",),
    ),
    "m4a": _Format("mp4", "audio/mp4", audio=("aac",), more=("-movflags", "+faststart")),
    "mp3": _Format("mp3", "audio/mpeg", audio=("libmp3lame",)),
    "ogg": _Format("ogg", "audio/ogg", audio=("libopus",)),
    "wav": _Format("wav", "audio/wav", audio=("pcm_s16le",)),
    "jpg": _Format(
        "image2", "image/jpeg", ("mjpeg", "-q:v", "3"), more=("-frames:v", "1", "-update", "1")
    ),
}

_DURATION = re.compile(r"Duration: (\d{1,9}):(\d\d):(\d\d(?:\.\d{1,9})?)")
_PROGRESS = re.compile(r"out_time_us=(-?[0-9]{1,18})\s*")
_STREAM = re.compile(r"Stream #0:\d+.*?: (Video|Audio):")


@dataclass(frozen=True, slots=True)
class Probe:
    """What ffmpeg found in the source; a duration of 0 is unknown."""

    duration_s: float
    has_video: bool
    has_audio: bool


def locate_ffmpeg(chosen: Path | None = None) -> Path:
    """The one that was chosen, the system's, or the one in the imageio-ffmpeg wheel."""
    if chosen is not None:
        if not chosen.is_file():
            raise UsageError(f"there is no ffmpeg at {chosen}")
        return chosen
    found = shutil.which("ffmpeg")
    if found:
        return Path(found).resolve()
    if importlib.util.find_spec("imageio_ffmpeg") is not None:
        import imageio_ffmpeg

        with contextlib.suppress(RuntimeError):  # a wheel without a program
            return Path(imageio_ffmpeg.get_ffmpeg_exe())
    raise UsageError("no ffmpeg found; install it, or: pip install 'tenure[transcode]'")


def is_from_wheel(program: Path) -> bool:
    """Whether it comes from a Python wheel, which the system does not update."""
    return "imageio_ffmpeg" in program.parts


def media_type(output: Output) -> str:
    """The Content-Type of an output."""
    return _FORMATS[output.format].media_type


def wants_video(output: Output) -> bool:
    """Whether this output needs a source with video."""
    return bool(_FORMATS[output.format].video)


def probe_command(program: Path) -> list[str]:
    """Describe the source; ffmpeg exits with an error, because it gets no output to make."""
    return [str(program), "-hide_banner", "-nostdin", *_input()]


def read_probe(stderr: str) -> Probe | None:
    """What `probe_command` found, or None if the source is no media file.

    >>> read_probe("  Duration: 00:01:02.50, start: 0\\n  Stream #0:0[0x1]: Video: h264")
    Probe(duration_s=62.5, has_video=True, has_audio=False)
    """
    kinds = set(_STREAM.findall(stderr))
    if not kinds:
        return None
    match = _DURATION.search(stderr)
    hours, minutes, seconds = match.groups() if match else ("0", "0", "0")
    duration_s = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    return Probe(duration_s, "Video" in kinds, "Audio" in kinds)


def convert_command(program: Path, output: Output, probe: Probe, *, threads: int) -> list[str]:
    """Make one output from the local copy, with progress on stdout."""
    chosen = _FORMATS[output.format]
    command = [str(program), "-hide_banner", "-nostdin", "-nostats", "-loglevel", "error"]
    command += ["-progress", "pipe:1", "-stats_period", "0.5", *_input()]
    command += ["-map_metadata", "-1", "-dn", "-sn", "-threads", str(threads)]
    command += _video(chosen, output) if chosen.video and probe.has_video else ["-vn"]
    command += _audio(chosen, output) if chosen.audio and probe.has_audio else ["-an"]
    return [*command, *chosen.more, "-f", chosen.muxer, "-y", f"file:{output.name}"]


def progress_us(line: str) -> int | None:
    """Microseconds of output made so far, if the line contains that.

    >>> progress_us("out_time_us=1920000"), progress_us("fps=25"), progress_us("out_time_us=N/A")
    (1920000, None, None)
    """
    match = _PROGRESS.fullmatch(line)
    return max(int(match[1]), 0) if match else None


def _input() -> list[str]:
    return ["-protocol_whitelist", "file", "-format_whitelist", FORMATS_READ, "-i", f"file:{INPUT}"]


def _video(chosen: _Format, output: Output) -> list[str]:
    options = ["-map", "0:v:0", "-c:v", *chosen.video]
    if output.height:  # never larger than the source; most encoders need even sizes
        options += ["-vf", f"scale=-2:min({output.height}\\,trunc(ih/2)*2)"]
    elif output.format != "jpg":
        options += ["-vf", "scale=trunc(iw/2)*2:trunc(ih/2)*2"]
    return [*options, "-b:v", f"{output.video_kbps}k"] if output.video_kbps else options


def _audio(chosen: _Format, output: Output) -> list[str]:
    options = ["-map", "0:a:0", "-c:a", *chosen.audio]
    return [*options, "-b:a", f"{output.audio_kbps}k"] if output.audio_kbps else options
