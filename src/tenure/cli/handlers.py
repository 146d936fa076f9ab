"""Loads the handlers of a worker: from files and modules, the built-in ones, those of an inbox.

The libraries of an inbox (cryptography, storage) are optional and therefore imported in functions.
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
from tenure.cli.console import note
from tenure.core.config import why_untrusted
from tenure.core.errors import UsageError
from tenure.core.registry import has_part, open_part
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
# By default a worker runs five transcodes, which may take hours, and holds fifteen events: a claim
# of ten (inbox contract, section 12), and five that are being delivered during the next claim.
TRANSCODES, _DELIVERIES = 5, 15
_SAMPLE_TIMEOUT_S = 60.0


def task_settings(config: Config) -> TaskSettings:
    """The settings of `tenure.tasks`."""
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
    """The tasks of several files or modules; raises if two of them have the same name.

    A later task only replaces a built-in one, so that `tenure up app.py` runs your `chat` instead
    of the sample. `concurrency` is the configured number, 0 for the default.
    """
    if samples and _BUILT_IN not in targets:
        raise UsageError(f"--samples goes with {_BUILT_IN} only")
    found: dict[str, list[Task]] = {}
    origin: dict[str, str] = {}
    for target in targets:
        loaded: dict[str, list[Task]] = {}
        with_samples = samples and target == _BUILT_IN
        options: dict[str, Any] = {"urls": urls, "concurrency": concurrency}
        for each in load_tasks(target, config, samples=with_samples, **options):
            loaded.setdefault(each.name, []).append(each)
        for name, tasks in loaded.items():
            before = origin.get(name, _BUILT_IN)
            if before != _BUILT_IN and not _same(tasks, found[name]):
                raise UsageError(f"task {name!r} is in {before} and in {target}; one must go")
            origin[name] = target
        found |= loaded
    return [each for tasks in found.values() for each in tasks]


def load_tasks(
    target: str,
    config: Config,
    *,
    samples: bool = False,
    urls: Sequence[str] = (),
    concurrency: int = 0,
) -> list[Task]:
    """All `@task` functions of a file or module, or the built-in ones for these settings."""
    if target == _BUILT_IN:
        from tenure.tasks import handlers

        tasks = handlers(task_settings(config), samples=samples)
        if not samples:
            return tasks
        from tenure.samples import sample_flows

        for flow in sample_flows():
            for name, handler in (flow.handlers or {}).items():
                tasks.append(task(name, timeout_s=_SAMPLE_TIMEOUT_S)(handler))
        inbox = [url for url in urls if has_part(url, "credentials")]
        return [*tasks, *_inbox_tasks(config, inbox)] if inbox else tasks
    if samples:
        raise UsageError(f"--samples goes with {_BUILT_IN} only")
    if target == INBOX:
        return _inbox_tasks(config, urls, at_once=concurrency)
    module = _file(Path(target)) if _is_path(target) else _module(target)
    named = {id(value): value for value in vars(module).values() if isinstance(value, Task)}
    found = list(named.values())  # once each, however many names it has in the module
    if not found:
        raise UsageError(
            f'{target} has no tasks; decorate a function with @task("name") '
            "(from tenure import task)"
        )
    return found


def load_named(reference: str, option: str) -> Any:
    """What `module:name` names; the module may be one of the files that hold tasks."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{option} is {reference!r}, and there is no such thing ({error}); it is MODULE:NAME, "
            "such as app:lifespan for a function in app.py"
        ) from None


def _same(some: Sequence[Task], others: Sequence[Task]) -> bool:
    """Whether they are the same functions: a file may have imported them from another."""
    return {each.where[1:] for each in some} == {each.where[1:] for each in others}


def default_concurrency(target: str) -> int | None:
    """The default concurrency of these tasks; None for the worker's own default."""
    return TRANSCODES + _DELIVERIES if target == INBOX else None


def with_slots(url: str) -> str:
    """The URL of an inbox or outbox with its default number of the worker's slots.

    >>> with_slots("inbox+sqlite:///a.db"), with_slots("inbox+sqlite:///a.db?box=outbox")
    ('inbox+sqlite:///a.db?at_once=5', 'inbox+sqlite:///a.db?box=outbox&at_once=15')
    """
    if not has_part(url, "credentials") or "at_once=" in url:
        return url
    return with_options(url, at_once=_DELIVERIES if "box=outbox" in url else TRANSCODES)


def with_share(url: str, slots: int, per_key: int) -> str:
    """The URL of an inbox that leaves a slot to other requesters; `per_key` 0 is no limit.

    >>> with_share("inbox+sqlite:///a.db", 5, 0)
    'inbox+sqlite:///a.db?share=4&requester_max=0'
    """
    if not has_part(url, "credentials") or "box=outbox" in url or "share=" in url:
        return url
    return with_options(url, share=max(1, slots - 1), requester_max=per_key)


def _is_path(target: str) -> bool:
    return target.endswith(".py") or "/" in target


def _file(path: Path) -> ModuleType:
    """Import a file under its own name; it may import modules in its folder."""
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
    refused = _add_to_path(Path.cwd())
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module exists, but not one that it imports
        hint = f"; for a file write {name}.py" if Path(f"{name}.py").is_file() else ""
        why = f"; {refused}" if refused else ""
        raise UsageError(f"there is no module {name!r} here{hint}{why}") from None


def _add_to_path(folder: Path) -> str:
    """Make the modules of a folder importable; returns the reason if they are not.

    The folder comes last in the path, so that no module there shadows an installed one. A folder
    that every user may write is refused: another user could have put a module there.
    """
    if why := why_untrusted(folder.stat(), chosen=True):
        return f"modules in {folder} are not imported: it {why}; run `chmod o-w {folder}`"
    sys.path.append(str(folder))
    return ""


def _inbox_tasks(config: Config, urls: Sequence[str], *, at_once: int = 0) -> list[Task]:
    """The handlers for the inbox of the first URL, with `at_once` deliveries or the default.

    `--queue inbox+sqlite:///jobs.db --queue '...?box=outbox'` serves both queues. One of them is
    enough to find the other.
    """
    from tenure.cli.keys import open_ring
    from tenure.egress import Client, Guard, Policy
    from tenure.transcode import Transcoder, transcode_handler
    from tenure.vault import Vault
    from tenure.webhooks.deliver import RETRY, TIMEOUT_S, delivery_handler
    from tenure.webhooks.refresh import Refresher
    from tenure.webhooks.signing import CachedSecrets, ChainedSecrets, read_secrets
    from tenure.webhooks.slots import AT_ONCE, DeliverySlots

    if not urls:
        raise UsageError("name the inbox, with --queue")
    guard = Guard(Policy(allow=tuple(config.texts("egress.allow"))))
    vault = Vault(open_ring(config))
    slots = DeliverySlots(at_once or AT_ONCE, per_requester=config.integer("webhooks.per_key"))
    of_operator = read_secrets(config.text("webhooks.secrets"))

    def secrets() -> EndpointSecrets:
        """The secrets of the requesters, else those of the operator."""
        of_requesters = open_part(urls[0], "endpoint_secrets", vault=vault)
        return CachedSecrets(ChainedSecrets(of_requesters, of_operator))

    async def make_delivery() -> Handler:
        standard = config.text("webhooks.headers") == "standard"
        return delivery_handler(Client(guard), secrets(), standard=standard, slots=slots)

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
        atexit.register(transcoder.close)  # the next worker removes the folder of a killed one
        return transcode_handler(transcoder)

    if not all("box=outbox" in url for url in urls):  # else it only delivers webhooks
        settings = transcode_settings(config)
        _sweep(settings.work_folder)
        _log_ffmpeg(settings)
    return [
        # No retry policy: the contract's error classes and the job's max_attempts decide.
        task("transcode")(_lazy(make_transcoder)),
        task("webhook", retry=RETRY, timeout_s=TIMEOUT_S)(_lazy(make_delivery)),
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


def _log_ffmpeg(chosen: TranscodeSettings) -> None:
    """Log at the start which ffmpeg is used and how it is confined."""
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
    """Remove the folders of killed workers at the start: they contain sources of customers."""
    from tenure.transcode.cage import sweep

    try:
        swept = sweep(folder)
    except OSError as error:
        log.warning("work folders cannot be swept", folder=str(folder), error=str(error))
    else:
        if swept:
            log.info("removed the work folders of workers that were killed", folders=swept)


def _lazy(make: Callable[[], Awaitable[Handler]]) -> Handler:
    """A handler that is made at its first job, in the event loop of the worker."""
    made: list[Handler] = []
    lock = asyncio.Lock()

    async def handle(job: Any) -> Any:
        async with lock:
            if not made:
                made.append(await make())
        return await made[0](job)

    return handle
