"""`embed` and `rag` with vectors from a real HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tenure.core.outcome import Fatal
from tenure.tasks import ModelSettings
from tenure.tasks.model import ModelServer
from tenure.tasks.rag import VectorCache, cut, embed, rag, read_folder
from tests.unit.tasks.attempt import Attempt
from tests.unit.tasks.model_server import Script, model_server

DOCUMENTS = [
    {"id": "bees", "text": "Bees make honey in hives."},
    {"id": "rails", "text": "Trains run on rails of steel."},
    {"id": "wells", "text": "Wells bring up water."},
]


@pytest.fixture
def script() -> Iterator[Script]:
    with model_server(tokens=["Bees ", "do [1]."]) as running:
        yield running


@pytest.fixture
async def server(script: Script) -> AsyncIterator[ModelServer]:
    server = ModelServer(ModelSettings(script.url, "m1", embed_model="e1"))
    yield server
    await server.close()


async def test_many_texts_are_embedded_in_batches_in_their_order(
    script: Script, server: ModelServer
) -> None:
    job = Attempt({"input": [f"text number {n}" for n in range(150)]})
    result = await embed(job, server)
    assert len(result["embeddings"]) == 150
    assert result["dimensions"] == 64
    assert result["model"] == "e1"
    alone = await embed(Attempt({"input": "text number 149"}), server)
    assert result["embeddings"][149] == alone["embeddings"][0]
    assert [event["data"] for event in job.events][-1] == {"done": 150, "of": 150}
    assert [len(body["input"]) for _, body, _ in script.asked] == [64, 64, 22, 1]


@pytest.mark.parametrize("payload", [{"input": []}, {"input": " "}, {"input": ["a"] * 513}, {}])
async def test_an_input_that_cannot_be_embedded_ends_the_job(
    payload: dict[str, object], server: ModelServer
) -> None:
    with pytest.raises(Fatal, match="input"):
        await embed(Attempt(payload), server)


async def test_the_passage_that_knows_comes_first_and_the_answer_cites_it(
    script: Script, server: ModelServer
) -> None:
    job = Attempt({"question": "Who make honey?", "documents": DOCUMENTS, "top_k": 2})
    result = await rag(job, VectorCache(server), None)
    assert result["passages"][0]["document"] == "bees"
    assert len(result["passages"]) == 2
    assert result["answer"] == "Bees do [1]."
    assert job.text_of("token") == "Bees do [1]."
    assert "[1] (bees) Bees make honey" in script.asked[-1][1]["messages"][1]["content"]


async def test_a_folder_is_searched_and_embedded_only_once(
    tmp_path: Path, script: Script, server: ModelServer
) -> None:
    (tmp_path / "bees.md").write_text("Bees make honey in hives.")
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8")
    cache = VectorCache(server)
    for question in ("Who make honey?", "What do hives hold?"):
        job = Attempt({"question": question, "answer": False})
        result = await rag(job, cache, tmp_path)
        assert result["passages"][0]["document"] == "bees.md"
    assert [len(body["input"]) for _, body, _ in script.asked] == [2, 1]


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("no")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "own.txt").write_text("yes")
    assert read_folder(folder) == [("own.txt", "yes")]


async def test_no_documents_and_no_folder_says_what_to_set(server: ModelServer) -> None:
    with pytest.raises(Fatal, match="TENURE_RAG_FOLDER"):
        await rag(Attempt({"question": "?!"}), VectorCache(server), None)


def test_passages_overlap_and_lose_nothing() -> None:
    text = " ".join(f"word{n}" for n in range(500))
    passages = cut("d", text, 200)
    assert all(len(passage.text) <= 200 for passage in passages)
    said = {word for passage in passages for word in passage.text.split()}
    assert {f"word{n}" for n in range(500)} <= said
    assert all(left.start + len(left.text) > right.start for left, right in pairwise(passages))
