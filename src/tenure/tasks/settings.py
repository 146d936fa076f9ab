"""What the handlers need to know; the command line reads it from its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


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
    """Which of the six tasks can do real work: those whose means are set here."""

    model: ModelSettings | None = None
    rag_folder: Path | None = None
    tools_file: Path | None = None
