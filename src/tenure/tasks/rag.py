"""`rag`: find the passages that know, and let the model answer from them.

Documents are cut into overlapping passages, embedded, and ranked by cosine similarity. Without a
chat model, or with `"answer": false`, the passages themselves are the result.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenure.core.outcome import Fatal
from tenure.tasks import payload as shapes
from tenure.tasks.embedding import Embedder
from tenure.tasks.running import Running
from tenure.tasks.server import ModelServer
from tenure.tasks.talk import converse

PASSAGES_MAX = 2_000
_SUFFIXES = (".txt", ".md", ".rst")
_FILE_BYTES_MAX = 2_000_000
_BATCH = 64
_KEPT_VECTORS_MAX = 20_000
_SYSTEM = (
    "Answer from the numbered passages only and name the numbers you used in brackets. "
    "If they do not say it, say that they do not."
)


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document, by where it starts."""

    document: str
    start: int
    text: str


class PassageVectors:
    """Vectors of passages seen before, so that a folder is embedded once and not for every job."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._kept: OrderedDict[str, list[float]] = OrderedDict()

    async def of(self, texts: Sequence[str]) -> list[list[float]]:
        """One vector a text; asks the embedder only for what it has not seen."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._kept]
        fresh: dict[str, list[float]] = {}
        for start in range(0, len(missing), _BATCH):
            batch = missing[start : start + _BATCH]
            vectors, _ = await self._embedder.embed(batch)
            fresh |= {text: unit(vector) for text, vector in zip(batch, vectors, strict=True)}
        found = [fresh[text] if text in fresh else self._kept[text] for text in texts]
        self._kept |= fresh
        while len(self._kept) > _KEPT_VECTORS_MAX:
            self._kept.popitem(last=False)
        return found


async def rag(
    job: Running, vectors: PassageVectors, server: ModelServer | None, folder: Path | None
) -> dict[str, Any]:
    """Passages nearest to the question, and an answer made from them."""
    asked = shapes.read(job.payload, shapes.Rag)
    passages = [
        passage
        for name, text in _documents(asked, folder)
        for passage in cut(name, text, asked.chunk_chars)
    ]
    if not 0 < len(passages) <= PASSAGES_MAX:
        raise Fatal(f"there are {len(passages)} passages to search; 1 to {PASSAGES_MAX} will do")
    question, *rows = await vectors.of([asked.question, *(p.text for p in passages)])
    ranked = sorted(
        ((dot(question, row), passage) for row, passage in zip(rows, passages, strict=True)),
        key=lambda pair: -pair[0],
    )[: asked.top_k]
    found = [
        {"document": p.document, "start": p.start, "score": round(score, 4), "text": p.text}
        for score, p in ranked
    ]
    await job.report(
        None, "search", type="progress", data={"passages": len(passages), "found": len(found)}
    )
    return await _answered(job, asked, found, server)


async def _answered(
    job: Running, asked: shapes.Rag, found: list[dict[str, Any]], server: ModelServer | None
) -> dict[str, Any]:
    if not asked.answer:
        return {"passages": found}
    if server is None:
        note = "no model configured: set TENURE_LLM_URL for an answer in words"
        return {"passages": found, "answer": None, "note": note}
    text = "\n\n".join(f"[{i}] ({p['document']}) {p['text']}" for i, p in enumerate(found, 1))
    turns = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"{text}\n\nQuestion: {asked.question}"},
    ]
    said = await converse(job, server, turns, model=asked.model)
    return {
        "passages": found,
        "answer": said["text"],
        "model": said["model"],
        "usage": said["usage"],
    }


def _documents(asked: shapes.Rag, folder: Path | None) -> list[tuple[str, str]]:
    given = [shapes.Document(doc) if isinstance(doc, str) else doc for doc in asked.documents]
    if given:
        return [(doc.id or f"document {i}", doc.text) for i, doc in enumerate(given, 1)]
    if folder is None:
        raise Fatal('no documents: give "documents" in the payload, or set TENURE_RAG_FOLDER')
    return read_folder(folder)


def read_folder(folder: Path) -> list[tuple[str, str]]:
    """The text files of a folder, by their path in it; links that lead out are not followed."""
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


def cut(document: str, text: str, chars: int) -> list[Passage]:
    """Overlapping passages of about `chars`, ending at a paragraph, sentence or word if possible.

    >>> [p.text for p in cut("d", "One two three. Four five six.", 16)]
    ['One two three.', 'Four five six.']
    """
    passages, start = [], 0
    while start < len(text):
        end = _good_end(text, start, chars)
        piece = text[start:end].strip()
        if piece:
            passages.append(Passage(document, start, piece))
        if end >= len(text):
            break
        start = max(end - chars // 8 if chars >= 100 else end, start + 1)
    return passages


def _good_end(text: str, start: int, chars: int) -> int:
    limit = start + chars
    if limit >= len(text):
        return len(text)
    for mark in ("\n\n", ". ", "\n", " "):
        at = text.rfind(mark, start + chars // 2, limit)
        if at > start:
            return at + len(mark)
    return limit


def unit(vector: Sequence[float]) -> list[float]:
    """The vector with length 1; a zero vector stays as it is."""
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector] if length else list(vector)


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    """The cosine of two unit vectors."""
    return math.fsum(a * b for a, b in zip(left, right, strict=True))
