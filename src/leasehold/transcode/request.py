"""What a transcode job asks for. Credentials and signed URLs are not in here: they are sealed."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from leasehold.core.outcome import Fatal

OUTPUTS_MAX = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_JOB_ID = re.compile(r"[A-Za-z0-9_@:-][A-Za-z0-9_.@:-]{0,127}")

FormatName = Literal["mp4", "webm", "m4a", "mp3", "ogg", "wav", "jpg"]


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where something lies: `s3://bucket/key`, `gs://`, `az://container/key`, `https://`, `file://`.

    `endpoint`, `region` and `account` are routing and no secrets. `url` may be empty where the
    credentials bring a signed URL.
    """

    url: str = ""
    endpoint: str = ""
    region: str = ""
    account: str = ""


class Output(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file to make. 0 leaves a size or bit rate to the encoder."""

    name: str
    format: FormatName
    height: int = 0
    video_kbps: int = 0
    audio_kbps: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name[:100]!r} is no file name; letters, digits, . _ - will do")
        if not 0 <= self.height <= 4_320 or self.height % 2:
            raise ValueError("height is an even number up to 4320, or 0")
        if not 0 <= self.video_kbps <= 200_000 or not 0 <= self.audio_kbps <= 1_000:
            raise ValueError("video_kbps is at most 200000 and audio_kbps at most 1000")


class Transcode(msgspec.Struct, frozen=True, kw_only=True):
    """The payload: `destination` is a prefix under which the outputs are written."""

    source: Place
    outputs: list[Output]
    destination: Place = Place()

    def __post_init__(self) -> None:
        if not 1 <= len(self.outputs) <= OUTPUTS_MAX:
            raise ValueError(f"a job has 1 to {OUTPUTS_MAX} outputs")
        if len({output.name for output in self.outputs}) != len(self.outputs):
            raise ValueError("two outputs have the same name")


def read_request(payload: Any) -> Transcode:
    """The payload as its type; one that does not fit can never succeed."""
    try:
        return msgspec.convert(payload, Transcode)
    except msgspec.ValidationError as error:
        raise Fatal(f"the payload is no transcode job: {error}") from None


def output_key(job_id: str, fence: int, name: str) -> str:
    """The key below the destination. The claim's version keeps a stale worker from overwriting.

    >>> output_key("01J9", 3, "720p.mp4")
    '01J9/v3/720p.mp4'
    """
    if not _JOB_ID.fullmatch(job_id):
        raise Fatal(f"{job_id[:130]!r} cannot be part of a storage key")
    return f"{job_id}/v{fence}/{name}"
