"""An OpenAI-compatible server, and the tasks that talk to its model: chat, plan and code.

Errors that may pass by themselves (no connection, 408, 429, 5xx, a broken stream) ask for a retry,
after the time that the server names if it names one. Any other 4xx ends the job. A payload that
does not fit can never succeed, so it ends the job too.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec

from tenure.core.errors import UsageError
from tenure.core.outcome import Fatal, Retry
from tenure.vault import Secret, without_secrets

if TYPE_CHECKING:
    from tenure.tasks import ModelSettings

_PASSING = frozenset({408, 409, 425, 429})
_RETRY_AFTER_S_MAX = 600.0
_DETAIL_CHARS_MAX = 300
_CONNECT_TIMEOUT_S = 10.0
_NAME = "the model server"  # requesters read the errors, and its address is the operator's
_TOKEN_EVENTS_INTERVAL_S = 0.05

Shape = TypeVar("Shape", bound=msgspec.Struct)


class Running(Protocol):
    """What the handlers need of the worker's `Job`."""

    @property
    def payload(self) -> Any: ...

    @property
    def attempt(self) -> int: ...

    def report(
        self,
        progress: Any = None,
        step: str = "",
        *,
        type: str = "progress",  # noqa: A002 (the name is the event's own)
        data: Any = None,
    ) -> Awaitable[None]: ...


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: str
    content: str


class _Chat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt, or the turns so far."""

    prompt: str = ""
    messages: list[_Message] = []
    system: str = ""
    model: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    stop: list[str] = []

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError('give either "prompt" or "messages", and not empty')


class _Plan(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A goal to be cut into steps."""

    goal: str
    context: str = ""
    steps_max: int = 10
    model: str = ""

    def __post_init__(self) -> None:
        if not self.goal.strip() or not 1 <= self.steps_max <= 50:
            raise ValueError('"goal" says what to plan and "steps_max" is 1 to 50')


class _Code(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to write, and what is there already."""

    prompt: str
    language: str = ""
    context: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError('"prompt" says what the code shall do')


def read(payload: Any, shape: type[Shape], task: str) -> Shape:
    """The payload as its type, or `Fatal` with the error and the names of the fields."""
    try:
        return msgspec.convert(payload, shape)
    except msgspec.ValidationError as error:
        names = ", ".join(field.encode_name for field in msgspec.structs.fields(shape))
        raise Fatal(f"the payload of {task!r} does not fit: {error} (fields: {names})") from None


class _Chunk(msgspec.Struct, frozen=True):
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
    ) -> AsyncGenerator[_Chunk, None]:
        """The answer, in chunks as the model writes it."""
        body = {
            "model": model or await self.default_model(),
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        async with self._request("POST", "/chat/completions", body) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                yield _chunk(_object(await response.aread()), "message", "stop")  # it cannot stream
                return
            ended = False
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                said = _object(data.encode())
                if said.get("error"):
                    raise Retry(None, f"{_NAME} broke off: {_detail(data.encode())}")
                chunk = _chunk(said, "delta")
                ended = ended or bool(chunk.finish_reason)
                yield chunk
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
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _json(self, method: str, path: str, body: Any) -> dict[str, Any]:
        async with self._request(method, path, body) as response:
            return _object(await response.aread())

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: Any) -> AsyncIterator[httpx2.Response]:
        key = self._settings.key
        if self._client is None:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            wait = httpx2.Timeout(self._settings.timeout_s, connect=_CONNECT_TIMEOUT_S)
            self._client = httpx2.AsyncClient(headers=headers, timeout=wait)
        content = None if body is None else msgspec.json.encode(body)
        sent = {"Content-Type": "application/json"} if content else {}
        url = self._root + path
        try:
            async with self._client.stream(method, url, content=content, headers=sent) as response:
                if response.status_code != httpx2.codes.OK:
                    error = refusal(response, await response.aread(), _NAME)
                    # Servers quote the key that they refuse.
                    own = [Secret(key), Secret(self._root), Secret(urlsplit(self._root).netloc)]
                    error.args = (without_secrets(str(error), own),)
                    raise error
                yield response
        except httpx2.TransportError as error:
            words = str(error) or type(error).__name__
            raise Retry(None, f"{_NAME} could not be used: {words}") from None


def refusal(response: httpx2.Response, body: bytes, name: str) -> Retry | Fatal:
    """The error for an answer that is not a success."""
    status = response.status_code
    reason = f"{name} answered {status}: {_detail(body)}"
    if status in _PASSING or status >= httpx2.codes.INTERNAL_SERVER_ERROR:
        return Retry(_retry_after_s(response.headers.get("retry-after", ""), time.time()), reason)
    return Fatal(reason)


def _retry_after_s(value: str, now_s: float) -> float | None:
    """Seconds to wait by a Retry-After header (a number or a date), bounded; None without one.

    >>> _retry_after_s("7", 0), _retry_after_s("", 0), _retry_after_s("99999", 0)
    (7.0, None, 600.0)
    >>> _retry_after_s("Thu, 01 Jan 1970 00:00:30 GMT", 10.0)
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


def _chunk(answer: dict[str, Any], field: str, finish: str = "") -> _Chunk:
    choice = (answer.get("choices") or [{}])[0]
    text = (choice.get(field) or {}).get("content") or ""
    return _Chunk(text, choice.get("finish_reason") or finish, answer.get("usage"))


def _object(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError:
        words = content[:80].decode(errors="replace")
        raise Retry(None, f"{_NAME} did not answer with a JSON object: {words!r}") from None


def _detail(content: bytes) -> str:
    """The message of an error body, in any of its usual shapes."""
    try:
        body = msgspec.json.decode(content)
        error = body.get("error", body)
        text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (msgspec.DecodeError, AttributeError):
        text = None
    return " ".join(str(text or content.decode(errors="replace")).split())[:_DETAIL_CHARS_MAX]


_PLAN = (
    "You plan work. Answer only with a JSON array of at most {steps_max} short strings, "
    "each one step, in order. No other text."
)
_CODE = (
    "You write {language}code. Answer with one fenced code block that is complete and runs, "
    "then at most three sentences about it."
)
_FENCE = re.compile(r"```([\w+#.-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_NUMBERED = re.compile(r"^\s*(?:\d+[.)]|[-*])\s+(.*\S)", re.MULTILINE)


async def chat(job: Running, server: ModelServer) -> dict[str, Any]:
    """Answer a prompt or a conversation."""
    asked = read(job.payload, _Chat, "chat")
    turns = [{"role": turn.role, "content": turn.content} for turn in asked.messages]
    if asked.prompt:
        turns = [{"role": "user", "content": asked.prompt}]
    if asked.system:
        turns = [{"role": "system", "content": asked.system}, *turns]
    options = {
        name: value
        for name in ("temperature", "max_tokens", "stop")
        if (value := getattr(asked, name)) not in (None, [])
    }
    return await converse(job, server, turns, model=asked.model, options=options)


async def plan(job: Running, server: ModelServer) -> dict[str, Any]:
    """Cut a goal into steps; the result has them as a list."""
    asked = read(job.payload, _Plan, "plan")
    goal = asked.goal + (f"\n\nContext:\n{asked.context}" if asked.context else "")
    system = _PLAN.format(steps_max=asked.steps_max)
    answer = await converse(job, server, turns_of(system, goal), model=asked.model)
    return answer | {"steps": _steps_of(answer["text"])[: asked.steps_max]}


async def code(job: Running, server: ModelServer) -> dict[str, Any]:
    """Write code; the result has the block by itself beside the whole answer."""
    asked = read(job.payload, _Code, "code")
    system = _CODE.format(language=f"{asked.language} " if asked.language else "")
    prompt = asked.prompt + (f"\n\nWhat is there:\n{asked.context}" if asked.context else "")
    answer = await converse(job, server, turns_of(system, prompt), model=asked.model)
    language, text = _code_of(answer["text"])
    return answer | {"code": text, "language": language or asked.language}


def turns_of(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


async def converse(
    job: Running,
    server: ModelServer,
    turns: list[dict[str, str]],
    *,
    model: str = "",
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The model's answer; its text goes out as events of type `token` while it is written."""
    parts: list[str] = []
    unsent: list[str] = []
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def send_tokens() -> None:
        """Send what has arrived, at once, then at most about twenty times a second."""
        while await arrived.wait():
            arrived.clear()
            if unsent:
                text = "".join(unsent)
                unsent.clear()
                await job.report(None, "model", type="token", data={"text": text})
            elif ended.is_set():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _TOKEN_EVENTS_INTERVAL_S)
                arrived.set()

    finish, usage = "", None
    sending = asyncio.create_task(send_tokens())
    try:
        async with aclosing(server.chat(turns, model=model, options=options or {})) as chunks:
            async for chunk in chunks:
                finish, usage = chunk.finish_reason or finish, chunk.usage or usage
                if sending.done():
                    break
                if chunk.text:
                    parts.append(chunk.text)
                    unsent.append(chunk.text)
                    arrived.set()
        ended.set()
        arrived.set()
        await sending  # raises what a report raised, such as a lost lease
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    if not parts:
        raise Retry(None, "the model answered nothing")
    used = model or await server.default_model()
    return {"text": "".join(parts), "model": used, "finish_reason": finish, "usage": usage}


def _steps_of(text: str) -> list[str]:
    """The steps in an answer: the JSON array it should be, else its numbered or dashed lines.

    >>> _steps_of('Sure: ["dig", "plant"]'), _steps_of("1. dig\\n2. plant"), _steps_of("just dig")
    (['dig', 'plant'], ['dig', 'plant'], ['just dig'])
    """
    start, end = text.find("["), text.rfind("]")
    if 0 <= start < end:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(text[start : end + 1], type=list[str])
    return _NUMBERED.findall(text) or [line.strip() for line in text.splitlines() if line.strip()]


def _code_of(text: str) -> tuple[str, str]:
    """The language and body of the first fenced block; without one, the whole text is the code.

    >>> _code_of("Here:\\n```python\\nprint(1)\\n```\\nDone.")
    ('python', 'print(1)\\n')
    """
    found = _FENCE.search(text)
    return (found[1], found[2]) if found else ("", text)
