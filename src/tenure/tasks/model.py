"""A client for OpenAI-compatible servers, and the tasks that use its model: chat, plan and code.

Transient errors (no connection, 408, 429, 5xx, a broken stream) ask for a retry, after the time in
Retry-After if there is one. Any other 4xx, and a payload that does not fit, end the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec
from msgspec import Meta

from tenure.core.errors import UsageError
from tenure.core.outcome import Fatal, Retry
from tenure.core.redaction import Redaction
from tenure.core.retry import retry_after_ms
from tenure.egress import Client, EgressError, Limits, RequestRefused, Unguarded, read_target
from tenure.egress.client import StreamedResponse

if TYPE_CHECKING:
    from tenure.tasks import ModelSettings

_TRANSIENT = frozenset({408, 409, 425, 429})
_DETAIL_CHARS_MAX = 300
_SECRET_CHARS_MIN = 6  # shorter values would blank out ordinary words
_LIMITS = Limits(connect_ms=10_000, total_ms=3_600_000)
_NAME = "the model server"  # requesters read the errors; the address is the operator's
_TOKEN_EVENTS_INTERVAL_S = 0.05

Shape = TypeVar("Shape", bound=msgspec.Struct)
Text = Annotated[str, Meta(pattern=r"\S")]


class RunningJob(Protocol):
    """The part of the worker's `Job` that the handlers use."""

    @property
    def payload(self) -> Any: ...

    @property
    def attempt(self) -> int: ...

    def report(
        self,
        progress: Any = None,
        step: str = "",
        *,
        type: str = "progress",  # noqa: A002 (the event's own field)
        data: Any = None,
    ) -> Awaitable[None]: ...


def read(payload: Any, shape: type[Shape], task: str) -> Shape:
    """The payload as its type; `Fatal` with the error and the names of the fields otherwise."""
    try:
        return msgspec.convert(payload, shape)
    except msgspec.ValidationError as error:
        names = ", ".join(field.encode_name for field in msgspec.structs.fields(shape))
        raise Fatal(f"the payload of {task!r} does not fit: {error} (fields: {names})") from None


# What both HTTP callers (the model, the tools) need.


def split_login(url: str) -> tuple[str, dict[str, str]]:
    """A URL without user and password, and the Authorization header for them."""
    parts = urlsplit(url)
    login, found, host = parts.netloc.rpartition("@")
    if not found:
        return url, {}
    code = b64encode(unquote(login).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {code}"}


def refusal(status: int, headers: Mapping[str, str], body: bytes, name: str) -> Retry | Fatal:
    """The error for an answer that is not a success."""
    reason = f"{name} answered {status}: {_detail(body)}"
    if status in _TRANSIENT or status >= 500:
        after_ms = retry_after_ms(headers.get("retry-after", ""), time.time())
        return Retry(after_ms / 1000 if after_ms else None, reason)
    return Fatal(reason)


def hide(text: str, secrets: Iterable[str]) -> str:
    """The text with these secrets replaced by ***."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SECRET_CHARS_MIN:
            text = text.replace(secret, "***")
    return text


def _detail(content: bytes) -> str:
    """The message of an error body, in any of the usual shapes."""
    try:
        body = msgspec.json.decode(content)
        error = body.get("error", body)
        text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (msgspec.DecodeError, AttributeError):
        text = None
    return " ".join(str(text or content.decode(errors="replace")).split())[:_DETAIL_CHARS_MAX]


class _Delta(msgspec.Struct, frozen=True):
    """A part of a streamed answer; the last ones carry the finish reason and the usage."""

    text: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] | None = None


class ModelServer:
    """One server. Its connections belong to the event loop that used it first."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._root, login = split_login(settings.url.rstrip("/"))
        try:
            target = read_target(self._root)
        except RequestRefused:
            raise UsageError(
                f"{settings.url!r} is no model server; one looks like http://127.0.0.1:8080/v1"
            ) from None
        if target.path == "/":
            self._root += "/v1"
        bearer = {"Authorization": f"Bearer {settings.key}"} if settings.key else {}
        self._headers = list((login | bearer).items())
        self._secrets = (settings.key, self._root, target.origin, target.authority)
        self._client = Client(Unguarded())
        self._default_model = settings.model
        self._lock = asyncio.Lock()

    async def chat(
        self, messages: list[dict[str, str]], *, model: str = "", options: Mapping[str, Any]
    ) -> AsyncGenerator[_Delta, None]:
        """The answer, in parts as the model writes it."""
        body = {
            "model": model or await self.default_model(),
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        async with self._request("POST", "/chat/completions", body) as answer:
            if "text/event-stream" not in answer.headers.get("content-type", ""):
                content = await self._read(answer)  # a server that cannot stream
                yield _delta(_object(content), "message", "stop")
                return
            ended = False
            async for line in self._lines(answer):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _object(data)
                if event.get("error"):
                    raise Retry(None, f"{_NAME} broke off: {_detail(data)}")
                delta = _delta(event, "delta")
                ended = ended or bool(delta.finish_reason)
                yield delta
            if not ended:
                raise Retry(None, f"{_NAME}: the answer broke off")

    async def embed(
        self, texts: list[str], *, model: str = ""
    ) -> tuple[list[list[float]], dict[str, Any]]:
        """One vector per text, in order; and the model with its usage."""
        chosen = model or self._settings.embed_model or await self.default_model()
        body = {"model": chosen, "input": texts, "encoding_format": "float"}
        answer = await self._json("POST", "/embeddings", body)
        rows = sorted(answer.get("data", []), key=lambda row: row.get("index", 0))
        if len(rows) != len(texts):
            raise Fatal(f"{_NAME} answered {len(rows)} vectors for {len(texts)} texts")
        return [row["embedding"] for row in rows], {"model": chosen, **(answer.get("usage") or {})}

    async def default_model(self) -> str:
        """The configured model, else the first one that the server lists."""
        async with self._lock:
            if not self._default_model:
                models = (await self._json("GET", "/models")).get("data", [])
                if not models:
                    raise Fatal(f"{_NAME} lists no model; set TENURE_LLM_MODEL")
                self._default_model = str(models[0]["id"])
        return self._default_model

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        async with self._request(method, path, body) as answer:
            return _object(await self._read(answer))

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: Any) -> AsyncIterator[StreamedResponse]:
        content = b"" if body is None else msgspec.json.encode(body)
        headers = [*self._headers, *([("Content-Type", "application/json")] if content else [])]
        url = self._root + path
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._settings.timeout_s):
                    answer = await stack.enter_async_context(
                        self._client.open(
                            method, url, headers=headers, body=content, limits=_LIMITS
                        )
                    )
                if answer.status != 200:
                    content = await self._read(answer)
                    error = refusal(answer.status, answer.headers, content, _NAME)
                    error.args = (self._hide(str(error)),)  # servers quote the key they refuse
                    raise error
                yield answer
        except TimeoutError:
            silent_s = self._settings.timeout_s
            raise Retry(None, f"{_NAME} could not be used: silent for {silent_s:g} s") from None
        except EgressError as error:
            raise Retry(None, f"{_NAME} could not be used: {self._hide(str(error))}") from None

    def _hide(self, text: str) -> str:
        return Redaction().text(hide(text, self._secrets))

    async def _chunks(self, answer: StreamedResponse) -> AsyncIterator[bytes]:
        """The body as it arrives; `timeout_s` limits the wait for each chunk."""
        while True:
            async with asyncio.timeout(self._settings.timeout_s):
                chunk = await anext(answer.chunks, None)
            if chunk is None:
                return
            yield chunk

    async def _read(self, answer: StreamedResponse) -> bytes:
        return b"".join([chunk async for chunk in self._chunks(answer)])

    async def _lines(self, answer: StreamedResponse) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in self._chunks(answer):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line


def _delta(event: dict[str, Any], field: str, finish: str = "") -> _Delta:
    choice = (event.get("choices") or [{}])[0]
    text = (choice.get(field) or {}).get("content") or ""
    return _Delta(text, choice.get("finish_reason") or finish, event.get("usage"))


def _object(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError:
        start = content[:80].decode(errors="replace")
        raise Retry(None, f"{_NAME} did not answer with a JSON object: {start!r}") from None


# The tasks.


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str


class _Chat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt, or the messages so far."""

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
    """A goal to split into steps."""

    goal: Text
    context: str = ""
    steps_max: Annotated[int, Meta(ge=1, le=50)] = 10
    model: str = ""


class _Code(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the code shall do, and existing code."""

    prompt: Text
    language: str = ""
    context: str = ""
    model: str = ""


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


async def chat(job: RunningJob, server: ModelServer) -> dict[str, Any]:
    """Answer a prompt or a conversation."""
    request = read(job.payload, _Chat, "chat")
    messages = [{"role": each.role, "content": each.content} for each in request.messages]
    if request.prompt:
        messages = [{"role": "user", "content": request.prompt}]
    if request.system:
        messages = [{"role": "system", "content": request.system}, *messages]
    options = {
        name: value
        for name in ("temperature", "max_tokens", "stop")
        if (value := getattr(request, name)) not in (None, [])
    }
    return await converse(job, server, messages, model=request.model, options=options)


async def plan(job: RunningJob, server: ModelServer) -> dict[str, Any]:
    """Split a goal into steps; the result has them as a list."""
    request = read(job.payload, _Plan, "plan")
    goal = request.goal + (f"\n\nContext:\n{request.context}" if request.context else "")
    messages = prompt(_PLAN.format(steps_max=request.steps_max), goal)
    answer = await converse(job, server, messages, model=request.model)
    return answer | {"steps": _steps_of(answer["text"])[: request.steps_max]}


async def code(job: RunningJob, server: ModelServer) -> dict[str, Any]:
    """Write code; the result has the code block besides the whole answer."""
    request = read(job.payload, _Code, "code")
    system = _CODE.format(language=f"{request.language} " if request.language else "")
    text = request.prompt + (f"\n\nWhat is there:\n{request.context}" if request.context else "")
    answer = await converse(job, server, prompt(system, text), model=request.model)
    language, block = _code_of(answer["text"])
    return answer | {"code": block, "language": language or request.language}


def prompt(system: str, user: str) -> list[dict[str, str]]:
    """The messages for a single question."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


async def converse(
    job: RunningJob,
    server: ModelServer,
    messages: list[dict[str, str]],
    *,
    model: str = "",
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The model's answer; its text is also sent as `token` events while the model writes."""
    parts: list[str] = []
    unsent: list[str] = []
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def send_tokens() -> None:
        """Send the first text at once, then at most about twenty events a second."""
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
        async with aclosing(server.chat(messages, model=model, options=options or {})) as deltas:
            async for delta in deltas:
                finish, usage = delta.finish_reason or finish, delta.usage or usage
                if sending.done():
                    break
                if delta.text:
                    parts.append(delta.text)
                    unsent.append(delta.text)
                    arrived.set()
        ended.set()
        arrived.set()
        await sending  # raises the error of a report, such as a lost lease
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
