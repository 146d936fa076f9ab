"""The two handlers of an inbox, put together from the settings: `transcode` and `webhook`.

`leasehold worker leasehold.transcode --from inbox+sqlite:///jobs.db --from '...?box=outbox'` serves
both; either queue alone will do. What they share (clients, the cage, the folder) is made in the
loop of the worker, at the first job that needs it.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from leasehold.cli.config import Config
from leasehold.cli.key_ring import open_ring
from leasehold.core.errors import UsageError
from leasehold.core.opening import open_part
from leasehold.core.retry import exponential
from leasehold.egress import Client, Guard, Policy
from leasehold.transcode import Transcoder, TranscodeSettings, transcode_handler
from leasehold.vault import Vault
from leasehold.webhooks.deliver import RETRY, TIMEOUT_S, delivery_handler
from leasehold.webhooks.refresh import Refresher
from leasehold.webhooks.secrets import EndpointSecrets, Remembered, Together, read_secrets
from leasehold.worker.task import Task, task

Handler = Callable[[Any], Awaitable[Any]]

_RETRY = exponential(5_000, max_attempts=5, delay_ms_max=3_600_000)


def inbox_tasks(config: Config, urls: Sequence[str]) -> list[Task]:
    """The handlers for the inbox that the first URL names."""
    if not urls:
        raise UsageError("name the inbox: --from inbox+sqlite:///jobs.db")
    guard = Guard(Policy(allow=tuple(config.texts("egress.allow"))))
    vault = Vault(open_ring(config))
    parts = _Parts(config, urls[0], guard, vault)
    return [
        task("transcode", retry=_RETRY)(_late(parts.transcoding)),
        task("webhook", retry=RETRY, timeout_s=TIMEOUT_S)(_late(parts.delivering)),
    ]


class _Parts:
    """Makes the handlers when they are first needed."""

    def __init__(self, config: Config, url: str, guard: Guard, vault: Vault) -> None:
        self._config = config
        self._url = url
        self._guard = guard
        self._vault = vault
        self._file = read_secrets(config.text("webhooks.secrets"))

    def _secrets(self) -> EndpointSecrets:
        """What requesters made for themselves, else what stands in the operator's file."""
        kept = open_part(self._url, "endpoint_secrets", vault=self._vault)
        return Remembered(Together(kept, self._file))

    async def delivering(self) -> Handler:
        standard = self._config.text("webhooks.headers") == "standard"
        return delivery_handler(Client(self._guard), self._secrets(), standard=standard)

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
    if files := config.text("transcode.files"):
        given["local_root"] = Path(files).expanduser()
    return TranscodeSettings(
        source_bytes_max=config.integer("transcode.source_bytes_max"),
        network_required=config.text("transcode.network") == "none",
        **given,
    )


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
