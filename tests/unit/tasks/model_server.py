"""A loopback HTTP server that speaks the OpenAI protocol, for tests: real sockets, fixed words."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """What the server shall do, and what it was asked."""

    tokens: list[str] = field(default_factory=lambda: ["Hello", ", ", "world"])
    pause_s: float = 0.0
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    breaks_off: bool = False
    streams: bool = True
    error_in_stream: str = ""
    says: str = "not today"
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    script: Script
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.script.asked.append((self.path, {}, dict(self.headers)))
        self._json(200, {"data": [{"id": "listed-model"}]})

    def do_POST(self) -> None:
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script.asked.append((self.path, body, dict(self.headers)))
        if script.status != 200:
            self._json(script.status, {"error": {"message": script.says}}, script.headers)
        elif self.path.endswith("/embeddings"):
            self._json(200, embeddings(body["input"]))
        elif script.streams:
            self._stream()
        else:
            message = {"content": "".join(script.tokens)}
            choice = {"message": message, "finish_reason": "stop"}
            self._json(200, {"choices": [choice], "usage": {"total_tokens": 3}})

    def _stream(self) -> None:
        script = self.script
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client may hang up
            for token in script.tokens:
                self._event({"choices": [{"delta": {"content": token}, "finish_reason": None}]})
                time.sleep(script.pause_s)
            if script.error_in_stream:
                self._event({"error": {"message": script.error_in_stream}})
            elif not script.breaks_off:
                self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
                self._event({"choices": [], "usage": {"total_tokens": len(script.tokens)}})
                self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def model_server(**wishes: Any) -> Iterator[Script]:
    """A running server; `script.url` is what TENURE_LLM_URL would be."""
    script = Script(**wishes)
    handler = type("Handler", (_Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()


def embeddings(texts: list[str]) -> dict[str, Any]:
    """Bags of words as vectors: texts that share words are near each other."""
    rows = [{"index": i, "embedding": _vector(text)} for i, text in enumerate(texts)]
    return {"data": rows[::-1], "usage": {"total_tokens": len(texts)}}  # order is not promised


def _vector(text: str) -> list[float]:
    vector = [0.0] * 64
    for word in text.lower().replace(".", " ").replace("?", " ").split():
        vector[hashlib.sha256(word.encode()).digest()[0] % 64] += 1.0
    return vector
