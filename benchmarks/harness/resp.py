"""A blocking Redis connection for the harness itself: a few commands between runs, no more."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import hiredis


class Link:
    """One connection over the server's unix socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(30)
        self._socket.connect(str(path))
        self._reader = hiredis.Reader()

    def call(self, *words: str | int) -> Any:
        """Send one command and return its reply; an error reply is raised."""
        self._socket.sendall(_packed(words))
        while (reply := self._reader.gets()) is False:
            chunk = self._socket.recv(65536)
            if not chunk:
                raise ConnectionError("the private Redis closed the connection: did it crash?")
            self._reader.feed(chunk)
        if isinstance(reply, hiredis.ReplyError):
            raise RuntimeError(f"{words[0]}: {reply}")
        return reply

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO as a mapping."""
        text: str = self.call("INFO", section).decode()
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def close(self) -> None:
        self._socket.close()


def _packed(words: tuple[str | int, ...]) -> bytes:
    parts = [str(word).encode() for word in words]
    body = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n%s" % (len(parts), body)
