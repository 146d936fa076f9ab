"""Which tasks a file or module brings, and what is said when it brings none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tenure.cli.config import Config
from tenure.cli.handlers import load_all, load_tasks
from tenure.core.errors import UsageError

APP = """
from tenure import exponential, task
import neighbour

@task("greet", retry=exponential(100))
async def greet(job):
    return neighbour.WORD

also = greet

@task("shout")
def shout(job):
    return 1

def not_a_task(job): ...
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return Config({}, tmp_path)


def test_a_file_brings_its_tasks_each_once_and_may_import_its_neighbours(
    tmp_path: Path, config: Config
) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "neighbour.py").write_text('WORD = "hello"\n')
    assert [task.name for task in load_tasks("app.py", config)] == ["greet", "shout"]


def test_a_module_is_found_from_the_current_folder(tmp_path: Path, config: Config) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "neighbour.py").write_text("WORD = 1\n")
    (tmp_path / "shop" / "jobs.py").write_text(APP)
    assert len(load_tasks("shop.jobs", config)) == 2


def test_the_built_in_tasks_are_the_six_of_the_contract(config: Config) -> None:
    names = {task.name for task in load_tasks("tenure.tasks", config)}
    assert names == {"chat", "plan", "code", "tool", "rag", "embed"}


def test_samples_bring_a_handler_for_the_sample_jobs_of_every_contract(config: Config) -> None:
    names = [task.name for task in load_tasks("tenure.tasks", config, samples=True)]
    assert len(set(names)) == len(names)
    assert set(names) >= {"chat", "embed", "video-generation"}


def test_a_task_of_your_own_takes_the_place_of_the_sample_of_its_name(
    tmp_path: Path, config: Config
) -> None:
    (tmp_path / "mine.py").write_text(
        'from tenure import task\n\n\n@task("chat")\ndef mine(job):\n    return 1\n'
    )
    tasks = load_all(["tenure.tasks", "mine.py"], config, samples=True)
    (chat,) = (task for task in tasks if task.name == "chat")
    assert chat.handler.__name__ == "mine"
    assert {"plan", "video-generation"} <= {task.name for task in tasks}
    with pytest.raises(UsageError, match="--samples goes with"):
        load_all(["mine.py"], config, samples=True)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("none.py", "there is no file none.py"),
        ("empty.py", 'empty.py has no tasks; decorate a function with @task("name")'),
        ("no_such_module", "there is no module 'no_such_module' here"),
        ("empty", "has no tasks"),
        ("folder/app.py", "there is no file folder/app.py"),
    ],
)
def test_a_target_without_tasks_is_told_what_would_be_right(
    tmp_path: Path, config: Config, target: str, words: str
) -> None:
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(UsageError) as raised:
        load_tasks(target, config)
    assert words in str(raised.value)


def test_a_missing_import_of_the_app_is_not_mistaken_for_a_missing_app(
    tmp_path: Path, config: Config
) -> None:
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_tasks("broken", config)


def test_two_files_with_a_task_of_the_same_name_are_an_error(
    tmp_path: Path, config: Config
) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(
            f'from tenure import task\n\n\n@task("mail")\ndef {name}(job):\n    return 1\n'
        )
    with pytest.raises(UsageError, match=r"'mail' is in first\.py and in second\.py; one must go"):
        load_all(["first.py", "second.py"], config)
    with pytest.raises(UsageError, match="one must go"):
        load_all(["tenure.tasks", "first.py", "second.py"], config)


def test_a_task_that_one_file_imports_from_another_is_one_task(
    tmp_path: Path, config: Config
) -> None:
    (tmp_path / "shared_tasks.py").write_text(
        'from tenure import task\n\n\n@task("mail")\ndef mail(job):\n    return 1\n'
    )
    (tmp_path / "shop_app.py").write_text("from shared_tasks import mail\n")
    (found,) = load_all(["shop_app.py", "shared_tasks.py"], config)
    assert found.name == "mail"


def test_a_module_beside_the_tasks_never_takes_the_place_of_an_installed_one(
    tmp_path: Path, config: Config
) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "neighbour.py").write_text("import tabnanny\nWORD = tabnanny.__file__\n")
    (tmp_path / "tabnanny.py").write_text("raise SystemExit(9)\n")
    greet, _ = load_tasks("app.py", config)
    assert not greet.handler.__globals__["neighbour"].WORD.startswith(str(tmp_path))


def test_modules_are_not_imported_from_a_folder_in_which_all_users_may_write(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "neighbour.py").write_text("raise SystemExit(9)\n")
    (tmp_path / "alone.py").write_text(APP.replace("import neighbour", ""))
    tmp_path.chmod(0o1777)
    assert len(load_tasks("alone.py", config)) == 2
    assert f"modules in {tmp_path} are not imported" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="neighbour"):
        load_tasks("app.py", config)
    with pytest.raises(UsageError, match=r"no module 'neighbour' here.*all users \(mode 1777\)"):
        load_tasks("neighbour", config)
