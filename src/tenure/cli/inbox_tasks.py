"""The two handlers of an inbox, put together from the settings: `transcode` and `webhook`.

`tenure worker tenure.transcode --from inbox+sqlite:///jobs.db --from '...?box=outbox'` serves
both; either queue alone will do. What they share (clients, the cage, the folder) is made in the
loop of the worker, at the first job that needs it.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from tenure.cli.config import Config
from tenure.cli.key_ring import open_ring
from tenure.core.errors import UsageError
from tenure.core.registry import open_part
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
    parts = _Parts(config, urls[0], guard, vault, at_once)
    if not all("box=outbox" in url for url in urls):  # else it only delivers
        chosen = transcode_settings(config)
        _sweep(chosen.work_folder)
        _look_at_ffmpeg(chosen)
    return [
        # Without a policy of its own: the contract's classes and the job's max_attempts decide.
        task("transcode")(_late(parts.transcoding)),
        task("webhook", retry=RETRY, timeout_s=TIMEOUT_S)(_late(parts.delivering)),
    ]


class _Parts:
    """Makes the handlers when they are first needed."""

    def __init__(self, config: Config, url: str, guard: Guard, vault: Vault, at_once: int) -> None:
        self._config = config
        self._url = url
        self._guard = guard
        self._vault = vault
        self._turns = Turns(at_once or AT_ONCE, per_requester=config.integer("webhooks.per_key"))
        self._file = read_secrets(config.text("webhooks.secrets"))

    def _secrets(self) -> EndpointSecrets:
        """What requesters made for themselves, else what stands in the operator's file."""
        kept = open_part(self._url, "endpoint_secrets", vault=self._vault)
        return Remembered(Together(kept, self._file))

    async def delivering(self) -> Handler:
        standard = self._config.text("webhooks.headers") == "standard"
        return delivery_handler(
            Client(self._guard), self._secrets(), standard=standard, turns=self._turns
        )

    async def transcoding(self) -> Handler:
        store = open_part(self._url, "credentials")
        client = Client(self._guard)
        refresher = Refresher(client, self._secrets(), store, self._vault)
        shared = Transcoder(
            store=store,
            vault=self._vault,
            refresh=refresher.refresh,
            guard=self._guard,
            client=client,
            settings=transcode_settings(self._config),
        )
        await shared.start()
        atexit.register(shared.close)  # a worker that is killed leaves its folder to the next one
        return transcode_handler(shared)


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
    """Say at the start, and not at the first job, what it is and what it cannot be kept from."""
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
    """At the start, and not only before the first job: what was left is a customer's source."""
    try:
        swept = sweep(folder)
    except OSError as error:
        log.warning("work folders cannot be swept", folder=str(folder), error=str(error))
    else:
        if swept:
            log.info("removed the work folders of workers that were killed", folders=swept)


def _late(make: Callable[[], Awaitable[Handler]]) -> Handler:
    """A handler that is made at its first job, once."""
    made: list[Handler] = []
    turn = asyncio.Lock()

    async def handle(job: Any) -> Any:
        async with turn:
            if not made:
                made.append(await make())
        return await made[0](job)

    return handle
