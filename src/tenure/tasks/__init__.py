"""Handlers for the six tasks of the `streams` contract, doing real work where they are given means.

`chat`, `plan` and `code` speak to any OpenAI-compatible server; `embed` and `rag` use a local
embedding model or that server; `tool` does what an allow-list permits. A task without means is
either a plainly labelled sample, for a first look, or fails at once and says which setting is
missing. `tenure worker tenure.tasks` serves them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tenure.core.errors import UsageError
from tenure.core.retry import RetryPolicy, exponential
from tenure.tasks.running import Running
from tenure.tasks.samples import sample, unavailable
from tenure.tasks.settings import ModelSettings, TaskSettings
from tenure.worker.task import Task, task

__all__ = ["TASKS", "ModelSettings", "TaskSettings", "handlers", "real_tasks"]

TASKS = ("chat", "plan", "code", "tool", "rag", "embed")

_RETRY = exponential(1_000, max_attempts=5, delay_ms_max=60_000)
_SAMPLE_RETRY = RetryPolicy(max_attempts=3, delay_ms=500)
_TIMEOUT_S = 900.0

Doing = Callable[[Running], Awaitable[Any]]


def handlers(settings: TaskSettings, *, samples: bool = False) -> list[Task]:
    """A handler for each of the six tasks, real where the settings give it the means."""
    real = _real(settings)
    made = []
    for name in TASKS:
        doing = real.get(name) or (_sample(name) if samples else _missing(name))
        retry = _RETRY if name in real else _SAMPLE_RETRY
        made.append(task(name, timeout_s=_TIMEOUT_S, retry=retry)(doing))
    return made


def real_tasks(settings: TaskSettings) -> list[str]:
    """The tasks that these settings let do real work."""
    return [name for name in TASKS if name in _real(settings)]


def _real(settings: TaskSettings) -> dict[str, Doing]:
    doing: dict[str, Doing] = {}
    if settings.tools_file is not None:
        doing["tool"] = _tool(settings.tools_file)
    from tenure.tasks.embedding import local_model_installed

    if settings.model is not None or local_model_installed():
        doing |= _with_model(settings.model, settings.rag_folder)
    return doing


def _tool(tools_file: Path) -> Doing:
    _need_http_client()
    from tenure.tasks.tool import use_tool
    from tenure.tasks.toolbox import load_tools

    tools = load_tools(tools_file)

    async def tool(job: Running) -> Any:
        return await use_tool(job, tools)

    return tool


def _with_model(model: ModelSettings | None, rag_folder: Path | None) -> dict[str, Doing]:
    _need_http_client()
    from tenure.tasks import embedding, rag, talk
    from tenure.tasks.server import ModelServer

    server = ModelServer(model) if model else None
    named = model is not None and bool(model.embed_model)
    embedder = embedding.choose_embedder(server, server_embeds=named)
    vectors = rag.PassageVectors(embedder)

    async def embed(job: Running) -> Any:
        return await embedding.embed(job, embedder)

    async def answer(job: Running) -> Any:
        return await rag.rag(job, vectors, server, rag_folder)

    doing: dict[str, Doing] = {"embed": embed, "rag": answer}
    if server is not None:
        doing |= {name: _talk(getattr(talk, name), server) for name in ("chat", "plan", "code")}
    return doing


def _talk(handler: Any, server: Any) -> Doing:
    async def talk(job: Running) -> Any:
        return await handler(job, server)

    return talk


def _sample(name: str) -> Doing:
    async def play(job: Running) -> Any:
        return await sample(job, name)

    return play


def _missing(name: str) -> Doing:
    async def refuse(job: Running) -> Any:
        raise unavailable(name)

    return refuse


def _need_http_client() -> None:
    try:
        import httpx2  # noqa: F401
    except ImportError:
        raise UsageError("these tasks need an HTTP client: pip install 'tenure[tasks]'") from None
