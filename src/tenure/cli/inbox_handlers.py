"""The two handlers of an inbox, made from the settings: `transcode` and `webhook`.

`tenure worker tenure.transcode --from inbox+sqlite:///jobs.db --from '...?box=outbox'` serves
both; either queue alone will do.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from tenure.cli.config import Config
from tenure.cli.keys import open_ring
from tenure.core.errors import UsageError
from tenure.core.opening import open_part
from tenure.egress import Client, Guard, Policy
from tenure.transcode import Transcoder, TranscodeSettings, transcode_handler
from tenure.transcode.cage import find_cage
from tenure.transcode.ffmpeg import is_from_wheel, locate_ffmpeg
from tenure.transcode.workspace import sweep
from tenure.vault import Vault
from tenure.webhooks.deliver import RETRY, TIMEOUT_S, delivery_handler
from tenure.webhooks.refresh import Refresher
from tenure.webhooks.secrets import EndpointSecrets, Remembered, Together, read_secrets
from tenure.webhooks.turns import AT_ONCE, Turns
from tenure.worker.task import Task, task

log = structlog.get_logger("tenure.worker")

Handler = Callable[[Any], Awaitable[Any]]


def inbox_tasks(config: Config, urls: Sequence[str], *, at_once: int = 0) -> list[Task]:
    """The handlers for the inbox that the first URL names; `at_once` deliveries, or the usual."""
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
