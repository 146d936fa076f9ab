"""The handlers of a worker: tasks of a file (`app.py`) or module, the built-in ones, an inbox's.

What an inbox needs (cryptography, an HTTP client, storage) is optional and imported in functions.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import structlog

from tenure.cli.config import Config, with_options
from tenure.cli.output import note
from tenure.core.errors import UsageError
from tenure.core.registry import open_part
from tenure.store.files import why_untrusted
from tenure.worker.decorator import task
from tenure.worker.task import Task

if TYPE_CHECKING:
    from tenure.tasks import TaskSettings
    from tenure.transcode import TranscodeSettings
    from tenure.webhooks.signing import EndpointSecrets

Handler = Callable[[Any], Awaitable[Any]]

log = structlog.get_logger("tenure.worker")


_BUILT_IN = "tenure.tasks"
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
    if samples and _BUILT_IN not in targets:
        raise UsageError(f"--samples goes with {_BUILT_IN} only")
    found: dict[str, list[Task]] = {}
    origin: dict[str, str] = {}
    for target in targets:
        mine: dict[str, list[Task]] = {}
        with_samples = samples and target == _BUILT_IN
        given: dict[str, Any] = {"urls": urls, "concurrency": concurrency}
        for each in load_tasks(target, config, samples=with_samples, **given):
            mine.setdefault(each.name, []).append(each)
        for name, tasks in mine.items():
            before = origin.get(name, _BUILT_IN)
            if before != _BUILT_IN and not _same(tasks, found[name]):
                raise UsageError(f"task {name!r} is in {before} and in {target}; one must go")
            origin[name] = target
        found |= mine
    return [each for tasks in found.values() for each in tasks]


def load_tasks(
    target: str,
    config: Config,
    *,
    samples: bool = False,
    urls: Sequence[str] = (),
    concurrency: int = 0,
) -> list[Task]:
    """All `@task` functions of a file or module; the built-in ones are made from the settings."""
    if target == _BUILT_IN:
        from tenure.tasks import handlers

        made = handlers(task_settings(config), samples=samples)
        if not samples:
            return made
        from tenure.cli.samples import FLOWS

        made += [each for flow in FLOWS for each in flow.tasks]
        inbox = [url for url in urls if url.startswith("inbox+")]
        return [*made, *_inbox_tasks(config, inbox)] if inbox else made
    if samples:
        raise UsageError(f"--samples goes with {_BUILT_IN} only")
    if target == INBOX:
        return _inbox_tasks(config, urls, at_once=concurrency)
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
    return {each.where[1:] for each in some} == {each.where[1:] for each in others}


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


def _inbox_tasks(config: Config, urls: Sequence[str], *, at_once: int = 0) -> list[Task]:
    """The handlers for the inbox that the first URL names; `at_once` deliveries, or the usual.

    `--from inbox+sqlite:///jobs.db --from '...?box=outbox'` serves both; either queue will do.
    """
    from tenure.cli.keys import open_ring
    from tenure.egress import Client, Guard, Policy
    from tenure.transcode import Transcoder, transcode_handler
    from tenure.vault import Vault
    from tenure.webhooks.deliver import RETRY, TIMEOUT_S, delivery_handler
    from tenure.webhooks.refresh import Refresher
    from tenure.webhooks.signing import Remembered, Together, read_secrets
    from tenure.webhooks.slots import AT_ONCE, Turns

    if not urls:
        raise UsageError("name the inbox: --from inbox+sqlite:///jobs.db")
    guard = Guard(Policy(allow=tuple(config.texts("egress.allow"))))
    vault = Vault(open_ring(config))
    turns = Turns(at_once or AT_ONCE, per_requester=config.integer("webhooks.per_key"))
    of_operator = read_secrets(config.text("webhooks.secrets"))

    def secrets() -> EndpointSecrets:
        """The secrets that requesters made, else those of the operator."""
        of_requesters = open_part(urls[0], "endpoint_secrets", vault=vault)
        return Remembered(Together(of_requesters, of_operator))

    async def make_delivery() -> Handler:
        standard = config.text("webhooks.headers") == "standard"
        return delivery_handler(Client(guard), secrets(), standard=standard, turns=turns)

    async def make_transcoder() -> Handler:
        store, client = open_part(urls[0], "credentials"), Client(guard)
        transcoder = Transcoder(
            store=store,
            vault=vault,
            refresh=Refresher(client, secrets(), store, vault).refresh,
            guard=guard,
            client=client,
            settings=transcode_settings(config),
        )
        await transcoder.start()
        atexit.register(transcoder.close)  # the next worker removes what a killed one leaves
        return transcode_handler(transcoder)

    if not all("box=outbox" in url for url in urls):  # else it only delivers
        settings = transcode_settings(config)
        _sweep(settings.work_folder)
        _look_at_ffmpeg(settings)
    return [
        # Without a policy of its own: the contract's classes and the job's max_attempts decide.
        task("transcode")(_made_at_first_job(make_transcoder)),
        task("webhook", retry=RETRY, timeout_s=TIMEOUT_S)(_made_at_first_job(make_delivery)),
    ]


def transcode_settings(config: Config) -> TranscodeSettings:
    """The settings of the transcoder."""
    from tenure.transcode import TranscodeSettings

    folder = config.text("transcode.folder")
    given: dict[str, Any] = {"work_folder": Path(folder).expanduser()} if folder else {}
    if program := config.text("transcode.ffmpeg"):
        given["ffmpeg"] = Path(program).expanduser()
    if files := config.text("transcode.files"):
        given["local_root"] = Path(files).expanduser()
    return TranscodeSettings(
        source_bytes_max=config.integer("transcode.source_bytes_max"),
        output_bytes_max=config.integer("transcode.output_bytes_max"),
        memory_bytes_max=config.integer("transcode.memory_bytes_max"),
        cpu_s_max=config.integer("transcode.cpu_s_max"),
        wall_s_max=config.number("transcode.wall_s_max"),
        threads_max=config.integer("transcode.threads_max"),
        required=tuple(config.texts("transcode.require")),
        readable=tuple(config.texts("transcode.readable")),
        **given,
    )


def _look_at_ffmpeg(chosen: TranscodeSettings) -> None:
    """Log at the start, not at the first job, which ffmpeg is used and how it is confined."""
    from tenure.transcode.cage import find_cage
    from tenure.transcode.ffmpeg import is_from_wheel, locate_ffmpeg

    try:
        program = locate_ffmpeg(chosen.ffmpeg)
    except UsageError as error:
        log.warning("transcodes will fail", reason=str(error))
        return
    cage = find_cage(program, chosen.readable, chosen.required)
    log.info(
        "ffmpeg is caged",
        program=str(program),
        network=cage.network,
        files=cage.files,
        syscalls="filtered" if cage.syscalls else "open",
    )
    if is_from_wheel(program):
        log.warning("ffmpeg is the wheel's, which the system does not patch", program=str(program))


def _sweep(folder: Path) -> None:
    """Remove at the start what killed workers left: it is the source of a customer."""
    from tenure.transcode.cage import sweep

    try:
        swept = sweep(folder)
    except OSError as error:
        log.warning("work folders cannot be swept", folder=str(folder), error=str(error))
    else:
        if swept:
            log.info("removed the work folders of workers that were killed", folders=swept)


def _made_at_first_job(make: Callable[[], Awaitable[Handler]]) -> Handler:
    """A handler that is made once, at its first job, in the event loop of the worker."""
    made: list[Handler] = []
    turn = asyncio.Lock()

    async def handle(job: Any) -> Any:
        async with turn:
            if not made:
                made.append(await make())
        return await made[0](job)

    return handle
