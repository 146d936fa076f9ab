"""Handlers for the six tasks of the `streams` contract, for `tenure worker tenure.tasks`.

`chat`, `plan`, `code`, `embed` and `rag` ask an OpenAI-compatible server; `tool` does what an
allow-list permits. A task whose setting is missing is either a plainly labelled sample, for a first
look, or fails at once and names the setting.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tenure.core.errors import UsageError
from tenure.core.outcome import Fatal
from tenure.core.retry import RetryPolicy, exponential
from tenure.worker.decorator import task
from tenure.worker.task import Task

if TYPE_CHECKING:
    from tenure.tasks.model import Running

__all__ = ["TASKS", "ModelSettings", "SampleFailure", "TaskSettings", "handlers", "real_tasks"]

TASKS = ("chat", "plan", "code", "tool", "rag", "embed")

_RETRY = exponential(1_000, max_attempts=5, delay_ms_max=60_000)
_SAMPLE_RETRY = RetryPolicy(max_attempts=3, delay_ms=500)
_TIMEOUT_S = 900.0
_NO_MODEL, _NO_TOOLS = (
    "no model configured: set TENURE_LLM_URL",
    "no tools configured: set TENURE_TOOLS",
)
_SAMPLE_TEXT = (
    "This is a sample answer, made of fixed words and no model. "
    "It shows how tokens arrive as events while a job runs."
)

Handler = Callable[["Running"], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """An OpenAI-compatible server. An empty `model` means: the first one it lists."""

    url: str
    model: str = ""
    key: str = field(default="", repr=False)
    embed_model: str = ""
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What the tasks may use; those without their setting do no real work."""

    model: ModelSettings | None = None
    rag_folder: Path | None = None
    tools_file: Path | None = None


def handlers(settings: TaskSettings, *, samples: bool = False) -> list[Task]:
    """A handler for each of the six tasks, real where the settings allow it."""
    real = _real(settings)
    made = []
    for name in TASKS:
        handler = real.get(name) or (_sample(name) if samples else _missing(name))
        retry = _RETRY if name in real else _SAMPLE_RETRY
        made.append(task(name, timeout_s=_TIMEOUT_S, retry=retry)(handler))
    return made


def real_tasks(settings: TaskSettings) -> list[str]:
    """The tasks that do real work with these settings."""
    return [name for name in TASKS if name in _real(settings)]


def _real(settings: TaskSettings) -> dict[str, Handler]:
    if settings.model is None and settings.tools_file is None:
        return {}
    try:
        from tenure.tasks import model, rag, tools
    except ImportError:
        raise UsageError("these tasks need an HTTP client: pip install 'tenure[tasks]'") from None
    made: dict[str, Handler] = {}
    if settings.tools_file is not None:
        made["tool"] = _bound(tools.use_tool, tools.load_tools(settings.tools_file))
    if settings.model is not None:
        server = model.ModelServer(settings.model)
        made |= {name: _bound(getattr(model, name), server) for name in ("chat", "plan", "code")}
        made["embed"] = _bound(rag.embed, server)
        made["rag"] = _bound(rag.rag, rag.VectorCache(server), settings.rag_folder)
    return made


def _bound(handler: Callable[..., Awaitable[Any]], *given: Any) -> Handler:
    async def handle(job: Running) -> Any:
        return await handler(job, *given)

    return handle


def _missing(name: str) -> Handler:
    async def refuse(job: Running) -> Any:
        raise Fatal(f"this worker cannot do {name!r}: {_note(name)}")

    return refuse


def _note(name: str) -> str:
    return _NO_TOOLS if name == "tool" else _NO_MODEL


class SampleFailure(Exception):
    """The failure that a sample job was asked for."""

    code = "sample_failure"


class _Play(msgspec.Struct, forbid_unknown_fields=True):
    """How a sample job shall behave: `"sample"` in its payload."""

    steps: int = 5
    delay_s: float = 0.1
    fail: int = 0


def _sample(name: str) -> Handler:
    """A handler for a first look: its result says `"sample": true` and which setting is missing."""

    async def handle(job: Running) -> dict[str, Any]:
        play = _play(job.payload)
        words = _SAMPLE_TEXT.split()
        for number in range(play.steps):
            await asyncio.sleep(play.delay_s)
            if job.attempt <= play.fail and number >= play.steps // 2:
                raise SampleFailure(f"this sample was asked to fail {play.fail} times")
            if name in ("chat", "plan", "code"):
                first, end = (n * len(words) // play.steps for n in (number, number + 1))
                data = {"text": " ".join(words[first:end]) + " "}
                await job.report(None, "sample", type="token", data=data)
            else:
                await job.report(round(100 * (number + 1) / play.steps), f"step {number + 1}")
        return {"sample": True, "note": _note(name), **_sample_result(name, job.payload)}

    return handle


def _play(payload: Any) -> _Play:
    asked = payload.get("sample", {}) if isinstance(payload, dict) else {}
    try:
        play = msgspec.convert(asked, _Play)
    except msgspec.ValidationError as error:
        raise Fatal(f'the payload\'s "sample" does not fit: {error}') from None
    if not (1 <= play.steps <= 1000 and 0 <= play.delay_s <= 60 and play.fail >= 0):
        raise Fatal('the payload\'s "sample" takes 1 to 1000 "steps" and up to 60 s "delay_s"')
    return play


def _sample_result(name: str, payload: Any) -> dict[str, Any]:
    match name:
        case "chat":
            return {"text": _SAMPLE_TEXT}
        case "plan":
            steps = ["set TENURE_LLM_URL", "submit this plan again"]
            return {"text": _SAMPLE_TEXT, "steps": steps}
        case "code":
            return {"text": _SAMPLE_TEXT, "code": 'print("sample")\n', "language": "python"}
        case "embed":
            # Numbers from a hash: right in shape, empty of meaning, the same for the same text.
            digest = hashlib.sha256(repr(payload).encode()).digest()
            return {"embeddings": [[byte / 255 for byte in digest[:8]]], "dimensions": 8}
        case "rag":
            return {"passages": [], "answer": None}
        case _:
            return {"tool": None}
