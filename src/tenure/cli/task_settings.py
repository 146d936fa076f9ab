"""The settings of the built-in tasks, taken from the configuration."""

from __future__ import annotations

from pathlib import Path

from tenure.cli.config import Config
from tenure.tasks import ModelSettings, TaskSettings


def task_settings(config: Config) -> TaskSettings:
    """What `tenure.tasks` may use here."""
    url, folder, tools = (config.text(name) for name in ("llm.url", "rag.folder", "tools"))
    model = ModelSettings(
        url=url,
        model=config.text("llm.model"),
        key=config.text("llm.key"),
        embed_model=config.text("llm.embed_model"),
        timeout_s=config.number("llm.timeout_s"),
    )
    return TaskSettings(
        model=model if url else None,
        rag_folder=Path(folder).expanduser() if folder else None,
        tools_file=Path(tools).expanduser() if tools else None,
    )
