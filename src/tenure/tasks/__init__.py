"""Handlers for the six tasks of the `streams` contract: `tenure worker tenure.tasks`.

`chat`, `plan`, `code`, `embed` and `rag` call an OpenAI-compatible server. `tool` runs what an
allow list permits. Without its setting a task either is a labelled sample (`tenure up`) or fails at
once with the name of the setting.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from tenure.core.outcome import Fatal
from tenure.core.retry import RetryPolicy, exponential
from tenure.samples import SampleFailure
from tenure.worker.decorator import task
from tenure.worker.task import Task

if TYPE_CHECKING:
    from tenure.tasks.model import RunningJob

__all__ = ["TASKS", "ModelSettings", "TaskSettings", "handlers", "real_tasks"]

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

Handler = Callable[["RunningJob"], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """An OpenAI-compatible server; an empty `model` means the first one that it lists."""

    url: str
    model: str = ""
    key: str = field(default="", repr=False)
    embed_model: str = ""
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """The settings of the tasks; None where there is none."""

    model: ModelSettings | None = None
    rag_folder: Path | None = None
    tools_file: Path | None = None


def handlers(settings: TaskSettings, *, samples: bool = False) -> list[Task]:
    """A handler for each of the six tasks: a real one if it is configured."""
    real = _real(settings)
    made = []
    for name in TASKS:
        handler = real.get(name) or (_sample(name) if samples else _missing(name))
        retry = _RETRY if name in real else _SAMPLE_RETRY
        made.append(task(name, timeout_s=_TIMEOUT_S, retry=retry)(handler))
    return made


def real_tasks(settings: TaskSettings) -> list[str]:
    """The tasks that have a real handler with these settings."""
    return [name for name in TASKS if name in _real(settings)]


def _real(settings: TaskSettings) -> dict[str, Handler]:
    if settings.model is None and settings.tools_file is None:
        return {}
    from tenure.tasks import model, rag, tools  # not above: a worker without settings starts faster

    made: dict[str, Handler] = {}
    if settings.tools_file is not None:
        made["tool"] = _bound(tools.use_tool, tools.load_tools(settings.tools_file))
    if settings.model is not None:
        server = model.ModelServer(settings.model)
        made |= {name: _bound(getattr(model, name), server) for name in ("chat", "plan", "code")}
        made["embed"] = _bound(rag.embed, server)
        made["rag"] = _bound(rag.rag, rag.VectorCache(server), settings.rag_folder)
    return made


def _bound(handler: Callable[..., Awaitable[Any]], *arguments: Any) -> Handler:
    async def handle(job: RunningJob) -> Any:
        return await handler(job, *arguments)

    return handle


def _missing(name: str) -> Handler:
    async def refuse(job: RunningJob) -> Any:
        raise Fatal(f"this worker cannot do {name!r}: {_note(name)}")

    return refuse


def _note(name: str) -> str:
    return _NO_TOOLS if name == "tool" else _NO_MODEL


class _SampleOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a sample job behaves: `"sample"` in its payload."""

    steps: Annotated[int, Meta(ge=1, le=1000)] = 5
    delay_s: Annotated[float, Meta(ge=0, le=60)] = 0.1
    fail: Annotated[int, Meta(ge=0)] = 0


def _sample(name: str) -> Handler:
    """A handler for a first look; its result contains `"sample": true` and the missing setting."""

    async def handle(job: RunningJob) -> dict[str, Any]:
        options = _sample_options(job.payload)
        words = _SAMPLE_TEXT.split()
        for number in range(options.steps):
            await asyncio.sleep(options.delay_s)
            if job.attempt <= options.fail and number >= options.steps // 2:
                raise SampleFailure(f"this sample was asked to fail {options.fail} times")
            if name in ("chat", "plan", "code"):
                first, end = (n * len(words) // options.steps for n in (number, number + 1))
                data = {"text": " ".join(words[first:end]) + " "}
                await job.report(None, "sample", type="token", data=data)
            else:
                await job.report(round(100 * (number + 1) / options.steps), f"step {number + 1}")
        return {"sample": True, "note": _note(name), **_sample_result(name, job.payload)}

    return handle


def _sample_options(payload: Any) -> _SampleOptions:
    options = payload.get("sample", {}) if isinstance(payload, dict) else {}
    try:
        return msgspec.convert(options, _SampleOptions)
    except msgspec.ValidationError as error:
        raise Fatal(f'the payload\'s "sample" does not fit: {error}') from None


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
            # The numbers of a hash: they have the right shape but no meaning.
            digest = hashlib.sha256(repr(payload).encode()).digest()
            return {"embeddings": [[byte / 255 for byte in digest[:8]]], "dimensions": 8}
        case "rag":
            return {"passages": [], "answer": None}
        case _:
            return {"tool": None}
