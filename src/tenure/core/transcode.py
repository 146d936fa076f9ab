"""The request for a transcode: types that the gateway and the worker share.

They allow only what a worker can do, so that a wrong request is refused when it is sent.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

OUTPUTS_MAX = 16
URL_CHARS_MAX = 4_096

FormatName = Literal["mp4", "webm", "m4a", "mp3", "ogg", "wav", "jpg"]
Url = Annotated[str, Meta(max_length=URL_CHARS_MAX)]
# In Python `$` also matches before a final line feed; clients that read the schema have no `\Z`.
_Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{0,63}$(?!\n)")]
# Without control characters: a secret becomes a header, and the storage client panics at others.
_Secret = Annotated[str, Meta(max_length=8_192, pattern=r"^[^\x00-\x1f\x7f]*$(?!\n)")]
FileName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$(?!\n)",
        description="A file name: letters, digits and . _ -, up to 100.",
    ),
]


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of a file: `s3://bucket/key`, `gs://`, `az://container/key`, `https://`, `file://`.

    `endpoint`, `region` and `account` are routing and no secrets. `url` may be empty where the
    credentials bring a signed URL.
    """

    url: Url = ""
    endpoint: Url = ""
    region: _Word = ""
    account: _Word = ""


class Output(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file to make. 0 leaves a size or bit rate to the encoder."""

    name: FileName
    format: FormatName
    height: Annotated[int, Meta(ge=0, le=4_320, multiple_of=2)] = 0
    video_kbps: Annotated[int, Meta(ge=0, le=200_000)] = 0
    audio_kbps: Annotated[int, Meta(ge=0, le=1_000)] = 0


class StorageKeys(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The credentials for one side of a transcode.

    `access_key_id` and `secret_access_key` (with `session_token`) for s3://, `token` for gs://, one
    of `sas_token`, `access_key` and `token` for az://. `signed_url` takes the place of a source,
    `signed_urls` (by the names of the outputs) that of a destination.
    """

    access_key_id: _Secret = ""
    secret_access_key: _Secret = ""
    session_token: _Secret = ""
    token: _Secret = ""
    sas_token: _Secret = ""
    access_key: _Secret = ""
    signed_url: Url = ""
    signed_urls: dict[str, Url] = {}


class StorageCredentials(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Short-lived and scoped: reading the source, writing below the destination."""

    source: StorageKeys = StorageKeys()
    destination: StorageKeys = StorageKeys()


class Transcode(msgspec.Struct, frozen=True, kw_only=True):
    """The payload: `destination` is a prefix under which the outputs are written."""

    source: Place
    outputs: Annotated[list[Output], Meta(min_length=1, max_length=OUTPUTS_MAX)]
    destination: Place = Place()

    def __post_init__(self) -> None:
        if len({output.name for output in self.outputs}) != len(self.outputs):
            raise ValueError("two outputs have the same name")
