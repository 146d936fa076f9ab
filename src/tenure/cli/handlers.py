"""The handlers of a worker: the tasks of a file (`app.py`) or module, or the built-in ones."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tenure.cli.config import Config, with_options
from tenure.cli.output import note
from tenure.core.errors import UsageError
from tenure.store.private import why_untrusted
from tenure.worker.task import Task

if TYPE_CHECKING:
    from tenure.tasks import TaskSettings


BUILT_IN = "tenure.tasks"
INBOX = "tenure.transcode"
# By default a worker holds five transcodes, which may take hours, and besides them events: ten of a
# claim (section 12), and as many again as are delivered at once while the next claim is under way.
SLOTS = {"inbox": 5, "outbox": 15}


def task_settings(config: Config) -> TaskSettings:
    """What `tenure.tasks` may use here."""
    from tenure.tasks import ModelSettings, TaskSettings

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


def load_all(
    targets: Sequence[str],
    config: Config,
    *,
    samples: bool = False,
    urls: Sequence[str] = (),
    concurrency: int = 0,
) -> list[Task]:
    """The tasks of several files or modules, of which no two may have a task of the same name.

    Only a built-in task gives way to one that comes later, so that `tenure up app.py` runs your
    `chat` instead of the sample of that name. `concurrency` is what the operator chose, 0 for
    nothing.
    """
    if samples and BUILT_IN not in targets:
        raise UsageError(f"--samples goes with {BUILT_IN} only")
    found: dict[str, list[Task]] = {}
    origin: dict[str, str] = {}
    for target in targets:
        mine: dict[str, list[Task]] = {}
        with_samples = samples and target == BUILT_IN
        for task in load_tasks(
            target, config, samples=with_samples, urls=urls, concurrency=concurrency
        ):
            mine.setdefault(task.name, []).append(task)
        for name, tasks in mine.items():
            before = origin.get(name, BUILT_IN)
            if before != BUILT_IN and not _same(tasks, found[name]):
                raise UsageError(f"task {name!r} is in {before} and in {target}; one must go")
            origin[name] = target
        found |= mine
    return [task for tasks in found.values() for task in tasks]


def load_tasks(
    target: str,
    config: Config,
    *,
    samples: bool = False,
    urls: Sequence[str] = (),
    concurrency: int = 0,
) -> list[Task]:
    """All `@task` functions of a file or module; the built-in ones are made from the settings."""
    if target == BUILT_IN:
        from tenure.tasks import handlers

        made = handlers(task_settings(config), samples=samples)
        if not samples:
            return made
        from tenure.cli.samples import sample_tasks

        return [*made, *sample_tasks(config, urls)]
    if samples:
        raise UsageError(f"--samples goes with {BUILT_IN} only")
    if target == INBOX:
        from tenure.cli.inbox_handlers import inbox_tasks

        return inbox_tasks(config, urls, at_once=concurrency)
    module = _file(Path(target)) if _is_path(target) else _module(target)
    named = {id(value): value for value in vars(module).values() if isinstance(value, Task)}
    found = list(named.values())  # once each, whatever names it has in the module
    if not found:
        raise UsageError(
            f'{target} has no tasks; decorate a function with @task("name") '
            "(from tenure import task)"
        )
    return found


def _same(some: Sequence[Task], others: Sequence[Task]) -> bool:
    """Whether they are the same functions, which a file may have imported from another."""
    return {task.where[1:] for task in some} == {task.where[1:] for task in others}


def usual(target: str) -> int | None:
    """How many attempts at once suit these tasks; None: as many as a worker takes by itself."""
    return sum(SLOTS.values()) if target == INBOX else None


def with_slots(url: str) -> str:
    """The URL of an inbox or outbox with the slots that its queue gets of a worker's by default.

    >>> with_slots("inbox+sqlite:///a.db"), with_slots("inbox+sqlite:///a.db?box=outbox")
    ('inbox+sqlite:///a.db?at_once=5', 'inbox+sqlite:///a.db?box=outbox&at_once=15')
    """
    if not url.startswith("inbox+") or "at_once=" in url:
        return url
    return with_options(url, at_once=SLOTS["outbox" if "box=outbox" in url else "inbox"])


def with_share(url: str, slots: int, per_key: int) -> str:
    """The URL of an inbox whose worker leaves a slot to other requesters; `per_key` 0: no limit.

    >>> with_share("inbox+sqlite:///a.db", 5, 0)
    'inbox+sqlite:///a.db?share=4&requester_max=0'
    """
    if not url.startswith("inbox+") or "box=outbox" in url or "share=" in url:
        return url
    return with_options(url, share=max(1, slots - 1), requester_max=per_key)


def _is_path(target: str) -> bool:
    return target.endswith(".py") or "/" in target


def _file(path: Path) -> ModuleType:
    """Import a file under its own name; it may import its neighbours."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}; give the file that holds your @task functions")
    name = path.stem
    if why := _add_to_path(path.resolve().parent):
        note(f"warning: {why}")
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a child process finds its handlers by this name
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    left_off = _add_to_path(Path.cwd())
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module is there; something that it imports is not
        hint = f"; for a file write {name}.py" if Path(f"{name}.py").is_file() else ""
        why = f"; {left_off}" if left_off else ""
        raise UsageError(f"there is no module {name!r} here{hint}{why}") from None


def _add_to_path(folder: Path) -> str:
    """Make the modules of a folder importable; returns why they are not.

    They come after all installed modules, so that none of them takes the place of one of those. A
    folder in which every user may write is left off: another user could have put a module there.
    """
    if why := why_untrusted(folder.stat(), chosen=True):
        return f"modules in {folder} are not imported: it {why}; run `chmod o-w {folder}`"
    sys.path.append(str(folder))
    return ""
