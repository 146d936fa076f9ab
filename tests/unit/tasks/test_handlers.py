"""Which handler a task gets, and that samples never pretend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenure.core.outcome import Fatal
from tenure.samples import SampleFailure
from tenure.tasks import (
    TASKS,
    ModelSettings,
    TaskSettings,
    handlers,
    real_tasks,
)
from tenure.worker.task import Task
from tests.unit.tasks.attempt import Attempt
from tests.unit.tasks.model_server import model_server


def by_name(settings: TaskSettings, *, samples: bool = False) -> dict[str, Task]:
    return {task.name: task for task in handlers(settings, samples=samples)}


@pytest.mark.parametrize("name", TASKS)
async def test_a_sample_says_that_it_is_one_and_what_to_set(name: str) -> None:
    job = Attempt({"sample": {"steps": 2, "delay_s": 0}})
    result = await by_name(TaskSettings(), samples=True)[name](job)
    assert result["sample"] is True
    assert "configured" in result["note"]
    assert len(job.events) == 2


async def test_a_sample_fails_as_often_as_it_is_asked_to() -> None:
    chat = by_name(TaskSettings(), samples=True)["chat"]
    payload = {"sample": {"steps": 2, "delay_s": 0, "fail": 1}}
    with pytest.raises(SampleFailure):
        await chat(Attempt(payload, attempt=1))
    assert (await chat(Attempt(payload, attempt=2)))["sample"] is True


async def test_without_means_and_without_samples_a_task_says_what_is_missing() -> None:
    with pytest.raises(Fatal, match=r"cannot do 'chat'.*TENURE_LLM_URL"):
        await by_name(TaskSettings())["chat"](Attempt({"prompt": "hi"}))
    with pytest.raises(Fatal, match="TENURE_TOOLS"):
        await by_name(TaskSettings())["tool"](Attempt({"tool": "x"}))


async def test_a_model_server_makes_five_tasks_real_and_a_tools_file_the_sixth(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tools.toml"
    path.write_text('[tools.hello]\ncommand = ["echo", "hello"]\n')
    with model_server() as script:
        settings = TaskSettings(model=ModelSettings(script.url, "m1"))
        assert set(real_tasks(settings)) == set(TASKS) - {"tool"}
        settings = TaskSettings(model=ModelSettings(script.url, "m1"), tools_file=path)
        assert real_tasks(settings) == list(TASKS)
        tasks = by_name(settings, samples=True)
        assert (await tasks["chat"](Attempt({"prompt": "hi"})))["text"] == "Hello, world"
        tool = await tasks["tool"](Attempt({"tool": "hello"}))
        assert tool["stdout"] == "hello\n"


def test_the_handlers_have_a_time_limit_and_a_retry_policy() -> None:
    assert all(task.timeout_s and task.retry for task in handlers(TaskSettings()))
