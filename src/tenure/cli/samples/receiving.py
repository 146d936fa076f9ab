"""What the inbox of `tenure up` needs around it, as settings of the child processes.

Always a key ring, made at the first start and kept in the data folder. With samples also a receiver
on loopback with a page: the port it has, the secret that it verifies with, and the two permissions
without which nobody could try this on one machine: webhooks may go to that one port, and `file://`
may name one folder. What the operator has set stays.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tenure.cli.config import Config
from tenure.cli.samples.inbox import REQUESTER
from tenure.store.files import write_private

HOST = "127.0.0.1"
_RING = "vault.keys"
_FILES = "transcode"
_ABOVE, _TRIED = 10, 10


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Settings for the children, the receiver's port (0: there is none), the samples' files."""

    environment: Mapping[str, str]
    port: int = 0
    files: Path = Path()

    @property
    def receiver_url(self) -> str:
        """Where the page is, and below it /hooks; empty without a receiver."""
        return f"http://{HOST}:{self.port}" if self.port else ""

    @property
    def receiver_words(self) -> list[str]:
        """The receiver as a command of the program."""
        return ["receiver", "--port", str(self.port), "--requester", REQUESTER]


async def surroundings(
    config: Config, data: Path, *, gateway_port: int, samples: bool
) -> Surroundings:
    """A key ring where none is set; with `samples` a receiver and what leads to it."""
    environment: dict[str, str] = {}
    if not config.is_set("vault.keys") and not config.is_set("vault.kms"):
        environment["TENURE_VAULT_KEYS_FILE"] = str(kept_ring(data))
    if not samples:
        return Surroundings(environment)
    port = port_above(gateway_port)
    allowed = [*config.texts("egress.allow"), f"{HOST}:{port}"]
    environment["TENURE_EGRESS_ALLOW"] = ",".join(allowed)
    environment["TENURE_WEBHOOKS_SECRETS"] = await _secrets(config.text("webhooks.secrets"))
    if theirs := config.text("transcode.files"):
        return Surroundings(environment, port, _below(theirs))
    environment["TENURE_TRANSCODE_FILES"] = str(data / _FILES)
    return Surroundings(environment, port, data / _FILES)


def _below(theirs: str) -> Path:
    """The samples' own part of the folder that the operator has chosen."""
    return Path(theirs).expanduser().absolute() / REQUESTER


def kept_ring(data: Path) -> Path:
    """The key ring's file, for its owner only; whole or not there at all."""
    from tenure.vault import new_kek

    path = data / _RING
    if path.exists():
        return path
    # Durable before it is used: what is sealed with it would be lost with it.
    write_private(path, new_kek(f"kek-{datetime.now(UTC):%Y-%m-%d}") + "\n")
    return path


def port_above(port: int) -> int:
    """A free port a little above, the same at every start as long as nobody else takes it.

    Not the next one: that is what a second `tenure up` is told to use.
    """
    first = port + _ABOVE
    for each in [*(p for p in range(first, first + _TRIED) if p < 65_536), 0]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, each))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("this machine has no free port")


async def _secrets(theirs: str) -> str:
    """The operator's own; where they have none for the samples, one made for this start."""
    from tenure.webhooks import new_secret
    from tenure.webhooks.signing import read_secrets

    if await read_secrets(theirs).live(REQUESTER):
        return theirs
    # Nobody's secrets are set: then whoever tries POST /transcode is verified too.
    whose = REQUESTER if theirs.strip() else "*"
    return f"{theirs}\n{whose} = {new_secret()}\n"
