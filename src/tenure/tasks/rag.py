"""The tasks `embed` (vectors of texts) and `rag` (search passages, then answer a question)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tenure.core.outcome import Fatal
from tenure.tasks.model import ModelServer, RunningJob, Text, converse, prompt, read

_BATCH = 64
_TEXTS_MAX = 512
_PASSAGES_MAX = 2_000
_SUFFIXES = (".txt", ".md", ".rst")
_FILE_BYTES_MAX = 2_000_000
_CACHED_VECTORS_MAX = 20_000
_RAG = (
    "Answer from the numbered passages only and name the numbers you used in brackets. "
    "If they do not say it, say that they do not."
)


class _Embed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One text or many, as in /v1/embeddings."""

    input: Text | Annotated[list[Text], Meta(min_length=1, max_length=_TEXTS_MAX)]
    model: str = ""


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """A text to search, and the name under which it is cited."""

    text: str
    id: str = ""


class _Rag(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A question, and the documents to search; without any, the configured folder."""

    question: Text
    documents: list[str | _Document] = []
    top_k: Annotated[int, Meta(ge=1, le=50)] = 4
    chunk_chars: Annotated[int, Meta(ge=100, le=8_000)] = 1_000
    answer: bool = True
    model: str = ""


async def embed(job: RunningJob, server: ModelServer) -> dict[str, Any]:
    """Vectors for one text or many, in batches with progress."""
    request = read(job.payload, _Embed, "embed")
    texts = [request.input] if isinstance(request.input, str) else request.input
    vectors: list[list[float]] = []
    used: dict[str, Any] = {}
    for start in range(0, len(texts), _BATCH):
        found, used = await server.embed(texts[start : start + _BATCH], model=request.model)
        vectors += found
        if len(texts) > _BATCH:
            done = {"done": len(vectors), "of": len(texts)}
            await job.report(None, "embed", type="progress", data=done)
    return {"embeddings": vectors, "dimensions": len(vectors[0]), **used}


@dataclass(frozen=True, slots=True)
class _Passage:
    """A part of a document, and the position where it starts."""

    document: str
    start: int
    text: str


class VectorCache:
    """Caches the vectors of passages, so that a folder is embedded once and not for every job."""

    def __init__(self, server: ModelServer) -> None:
        self.server = server
        self._cached: OrderedDict[str, list[float]] = OrderedDict()

    async def vectors(self, texts: Sequence[str]) -> list[list[float]]:
        """One unit vector per text; only texts that are not cached go to the server."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._cached]
        fresh: dict[str, list[float]] = {}
        for start in range(0, len(missing), _BATCH):
            batch = missing[start : start + _BATCH]
            vectors, _ = await self.server.embed(batch)
            fresh |= {text: _unit(vector) for text, vector in zip(batch, vectors, strict=True)}
        found = [fresh[text] if text in fresh else self._cached[text] for text in texts]
        self._cached |= fresh
        while len(self._cached) > _CACHED_VECTORS_MAX:
            self._cached.popitem(last=False)
        return found


async def rag(job: RunningJob, cache: VectorCache, folder: Path | None) -> dict[str, Any]:
    """The passages nearest to the question by cosine, and an answer made from them."""
    request = read(job.payload, _Rag, "rag")
    passages = [
        passage
        for name, text in _documents(request, folder)
        for passage in cut(name, text, request.chunk_chars)
    ]
    if not 0 < len(passages) <= _PASSAGES_MAX:
        raise Fatal(f"there are {len(passages)} passages to search; 1 to {_PASSAGES_MAX} will do")
    question, *rows = await cache.vectors([request.question, *(p.text for p in passages)])
    scores = [math.fsum(a * b for a, b in zip(question, row, strict=True)) for row in rows]
    ranked = sorted(zip(scores, passages, strict=True), key=lambda pair: -pair[0])[: request.top_k]
    found = [
        {"document": p.document, "start": p.start, "score": round(score, 4), "text": p.text}
        for score, p in ranked
    ]
    done = {"passages": len(passages), "found": len(found)}
    await job.report(None, "search", type="progress", data=done)
    if not request.answer:
        return {"passages": found}
    text = "\n\n".join(f"[{i}] ({p['document']}) {p['text']}" for i, p in enumerate(found, 1))
    messages = prompt(_RAG, f"{text}\n\nQuestion: {request.question}")
    answer = await converse(job, cache.server, messages, model=request.model)
    used = {"model": answer["model"], "usage": answer["usage"]}
    return {"passages": found, "answer": answer["text"], **used}


def _documents(request: _Rag, folder: Path | None) -> list[tuple[str, str]]:
    given = [_Document(doc) if isinstance(doc, str) else doc for doc in request.documents]
    if given:
        return [(doc.id or f"document {i}", doc.text) for i, doc in enumerate(given, 1)]
    if folder is None:
        raise Fatal('no documents: give "documents" in the payload, or set TENURE_RAG_FOLDER')
    return read_folder(folder)


def read_folder(folder: Path) -> list[tuple[str, str]]:
    """The text files of a folder with their paths in it; links that lead out are not followed."""
    root = folder.resolve()
    if not root.is_dir():
        raise Fatal("TENURE_RAG_FOLDER of this worker is no folder with text files")
    files = [path for path in sorted(root.rglob("*")) if path.suffix.lower() in _SUFFIXES]
    inside = [path for path in files if path.resolve().is_relative_to(root) and path.is_file()]
    return [
        (str(path.relative_to(root)), path.read_text(errors="replace"))
        for path in inside
        if path.stat().st_size <= _FILE_BYTES_MAX
    ]


def cut(document: str, text: str, chars: int) -> list[_Passage]:
    """Overlapping passages of about `chars`, ending at a paragraph, sentence or word if possible.

    >>> [p.text for p in cut("d", "One two three. Four five six.", 16)]
    ['One two three.', 'Four five six.']
    """
    passages, start = [], 0
    while start < len(text):
        end = _break_at(text, start, chars)
        if part := text[start:end].strip():
            passages.append(_Passage(document, start, part))
        if end >= len(text):
            break
        start = max(end - chars // 8 if chars >= 100 else end, start + 1)
    return passages


def _break_at(text: str, start: int, chars: int) -> int:
    limit = start + chars
    if limit >= len(text):
        return len(text)
    for mark in ("\n\n", ". ", "\n", " "):
        at = text.rfind(mark, start + chars // 2, limit)
        if at > start:
            return at + len(mark)
    return limit


def _unit(vector: Sequence[float]) -> list[float]:
    """The vector scaled to length 1; a zero vector stays as it is."""
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector] if length else list(vector)
