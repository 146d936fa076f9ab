"""How a local embedding model is found and used, with a small stand-in for the 90 MB package.

The package and PyTorch are an extra that tests do not install; what is proved here is that they are
looked for without being imported, loaded once, off the event loop, and preferred over a server that
was given no embedding model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.core.outcome import Fatal
from tenure.tasks import TaskSettings, real_tasks
from tenure.tasks.embedding import (
    LOCAL_PACKAGE,
    LocalModel,
    choose_embedder,
    embed,
    local_model_installed,
)
from tenure.tasks.server import ModelServer
from tenure.tasks.settings import ModelSettings
from tests.unit.tasks.attempt import Attempt

STAND_IN = """
import threading
loads = []
class Model:
    def encode(self, texts, show_progress_bar=True):
        assert threading.current_thread() is not threading.main_thread()
        return [[float(len(text)), 1.0] for text in texts]
def load_model():
    loads.append(1)
    return Model()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (LOCAL_PACKAGE, "sentence_transformers", "torch"):
        (tmp_path / f"{name}.py").write_text(STAND_IN if name == LOCAL_PACKAGE else "1 / 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop(LOCAL_PACKAGE, None)


def test_the_package_alone_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{LOCAL_PACKAGE}.py").write_text(STAND_IN)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not local_model_installed()


def test_it_is_found_without_being_imported(installed: None) -> None:
    assert local_model_installed()
    assert LOCAL_PACKAGE not in sys.modules
    assert real_tasks(TaskSettings()) == ["rag", "embed"]


async def test_it_is_loaded_once_and_works_in_a_thread(installed: None) -> None:
    model = LocalModel()
    for _ in range(2):
        result = await embed(Attempt({"input": ["ab", "abc"]}), model)
    assert result["embeddings"] == [[2.0, 1.0], [3.0, 1.0]]
    assert (result["dimensions"], result["local"]) == (2, True)
    assert sys.modules[LOCAL_PACKAGE].loads == [1]
    with pytest.raises(Fatal, match="the local model is"):
        await embed(Attempt({"input": "ab", "model": "other"}), model)


def test_a_server_with_an_embedding_model_of_its_own_is_preferred(installed: None) -> None:
    server = ModelServer(ModelSettings("http://127.0.0.1:1"))
    assert choose_embedder(server, server_embeds=True) is server
    assert isinstance(choose_embedder(server, server_embeds=False), LocalModel)
