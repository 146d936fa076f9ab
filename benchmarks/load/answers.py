"""HTTP answers as they come in, as far as a client that measures has to understand them."""

from __future__ import annotations


def whole(unread: bytes) -> tuple[bytes, bytes] | None:
    """Head and body of an answer that is all there; None while some of it is still to come."""
    head, found, body = unread.partition(b"\r\n\r\n")
    return (head, body) if found and len(body) >= _content_length(head) else None


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise RuntimeError("the answer has no Content-Length: this client reads no other kind")
