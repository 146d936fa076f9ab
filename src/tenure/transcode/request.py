"""What a transcode job asks for. Credentials and signed URLs are not in here: they are sealed."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tenure.core.outcome import Fatal
from tenure.core.transcode import FormatName, Output, Place, Transcode

__all__ = ["FormatName", "Output", "Place", "Transcode", "output_key", "read_request"]

_JOB_ID = re.compile(r"[A-Za-z0-9_@:-][A-Za-z0-9_.@:-]{0,127}")


def read_request(payload: Any) -> Transcode:
    """The payload as its type; one that does not fit can never succeed."""
    try:
        return msgspec.convert(payload, Transcode)
    except msgspec.ValidationError as error:
        raise Fatal(f"the payload is no transcode job: {error}", code="bad_request") from None


def output_key(job_id: str, fence: int, name: str) -> str:
    """The key below the destination. The claim's version keeps a stale worker from overwriting.

    >>> output_key("01J9", 3, "720p.mp4")
    '01J9/v3/720p.mp4'
    """
    if not _JOB_ID.fullmatch(job_id):
        raise Fatal(f"{job_id[:130]!r} cannot be part of a storage key", code="bad_request")
    return f"{job_id}/v{fence}/{name}"
