"""An OpenAI-compatible server: streamed chat completions, embeddings, and what its errors mean.

What may pass by itself (no connection, 408, 429, 5xx, a broken stream) asks for a retry, after the
time the server names if it names one. What will not (any other 4xx) ends the job.
"""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec

from tenure.core.errors import UsageError
from tenure.core.outcome import Fatal, Retry
from tenure.tasks.settings import ModelSettings
from tenure.vault import Secret, without_secrets

_PASSING = frozenset({408, 409, 425, 429})
_RETRY_AFTER_S_MAX = 600.0
_DETAIL_CHARS_MAX = 300
_CONNECT_TIMEOUT_S = 10.0
_NAME = "the model server"  # its address is the operator's, and errors are for requesters


class Piece(msgspec.Struct, frozen=True):
    """A part of a streamed answer; the last ones say why it ended and what it cost."""

    text: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] | None = None


class ModelServer:
    """One server. Its connections belong to the event loop that used it first."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._root = _root(settings.url)
        self._client: httpx2.AsyncClient | None = None
        self._default_model = settings.model
        self._asking = asyncio.Lock()

    async def chat(
        self, messages: list[dict[str, str]], *, model: str = "", options: Mapping[str, Any]
    ) -> AsyncIterator[Piece]:
        """The answer, piece by piece as the model makes it."""
        body = {
            "model": model or await self.default_model(),
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        async with self._request("POST", "/chat/completions", body) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                yield _whole(await response.aread())  # a server that cannot stream
                return
            ended = False
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                piece = _piece(data)
                ended = ended or bool(piece.finish_reason)
                yield piece
            if not ended:
                raise Retry(None, f"{_NAME}: the answer broke off")

    async def embed(
        self, texts: list[str], *, model: str = ""
    ) -> tuple[list[list[float]], dict[str, Any]]:
        """One vector a text, in order, and what it cost."""
        chosen = model or self._settings.embed_model or await self.default_model()
        body = {"model": chosen, "input": texts, "encoding_format": "float"}
        answer = await self._json("POST", "/embeddings", body)
        rows = sorted(answer.get("data", []), key=lambda row: row.get("index", 0))
        if len(rows) != len(texts):
            raise Fatal(f"{_NAME} answered {len(rows)} vectors for {len(texts)} texts")
        usage: dict[str, Any] = {"model": chosen, **(answer.get("usage") or {})}
        return [row["embedding"] for row in rows], usage

    async def default_model(self) -> str:
        """The configured model, else the first one the server lists."""
        async with self._asking:
            if not self._default_model:
                models = (await self._json("GET", "/models", None)).get("data", [])
                if not models:
                    raise Fatal(f"{_NAME} lists no model; set TENURE_LLM_MODEL")
                self._default_model = str(models[0]["id"])
        return self._default_model

    async def close(self) -> None:
        """Let go of connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _json(self, method: str, path: str, body: Any) -> dict[str, Any]:
        async with self._request(method, path, body) as response:
            return _object(await response.aread())

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: Any) -> AsyncIterator[httpx2.Response]:
        if self._client is None:
            headers = (
                {"Authorization": f"Bearer {self._settings.key}"} if self._settings.key else {}
            )
            wait = httpx2.Timeout(self._settings.timeout_s, connect=_CONNECT_TIMEOUT_S)
            self._client = httpx2.AsyncClient(headers=headers, timeout=wait)
        content = None if body is None else msgspec.json.encode(body)
        sent = {"Content-Type": "application/json"} if content else {}
        try:
            async with self._client.stream(
                method, self._root + path, content=content, headers=sent
            ) as response:
                if response.status_code != httpx2.codes.OK:
                    await response.aread()
                    raise self._without_key(refusal(response, _NAME))
                yield response
        except httpx2.TransportError as error:
            words = str(error) or type(error).__name__
            raise Retry(None, f"{_NAME} could not be used: {words}") from None

    def _without_key(self, error: Retry | Fatal) -> Retry | Fatal:
        """Servers quote the key that they refuse."""
        own = [Secret(self._settings.key), Secret(self._root), Secret(urlsplit(self._root).netloc)]
        error.args = (without_secrets(str(error), own),)
        return error


def refusal(response: httpx2.Response, name: str) -> Retry | Fatal:
    """What an answer other than 200 asks for. Its body must have been read."""
    status = response.status_code
    reason = f"{name} answered {status}: {_detail(response.content)}"
    if status in _PASSING or status >= httpx2.codes.INTERNAL_SERVER_ERROR:
        return Retry(retry_after_s(response.headers.get("retry-after", ""), time.time()), reason)
    return Fatal(reason)


def retry_after_s(value: str, now_s: float) -> float | None:
    """Seconds to wait by a Retry-After header (a number or a date), bounded; None without one.

    >>> retry_after_s("7", 0), retry_after_s("", 0), retry_after_s("99999", 0)
    (7.0, None, 600.0)
    >>> retry_after_s("Thu, 01 Jan 1970 00:00:30 GMT", 10.0)
    20.0
    """
    value = value.strip()
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now_s
        except ValueError:
            return None
    return min(max(seconds, 0.0), _RETRY_AFTER_S_MAX) if seconds == seconds else None


def _root(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no model server; one looks like http://127.0.0.1:8080/v1")
    return url.rstrip("/") if parts.path.strip("/") else url.rstrip("/") + "/v1"


def _piece(data: str) -> Piece:
    chunk = _object(data.encode())
    if chunk.get("error"):
        raise Retry(None, f"the model server broke off: {_detail(data.encode())}")
    choice = (chunk.get("choices") or [{}])[0]
    return Piece(
        text=(choice.get("delta") or {}).get("content") or "",
        finish_reason=choice.get("finish_reason") or "",
        usage=chunk.get("usage"),
    )


def _whole(content: bytes) -> Piece:
    answer = _object(content)
    choice = (answer.get("choices") or [{}])[0]
    text = (choice.get("message") or {}).get("content") or ""
    return Piece(text, choice.get("finish_reason") or "stop", answer.get("usage"))


def _object(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError:
        words = content[:80].decode(errors="replace")
        raise Retry(None, f"{_NAME} did not answer with a JSON object: {words!r}") from None


def _detail(content: bytes) -> str:
    """The words of an error body, whichever of the usual shapes it has."""
    try:
        body = msgspec.json.decode(content)
        error = body.get("error", body)
        text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (msgspec.DecodeError, AttributeError):
        text = None
    return " ".join(str(text or content.decode(errors="replace")).split())[:_DETAIL_CHARS_MAX]
