"""The vault's key ring as the settings describe it: lines of keys, or a ring of the operator's."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from tenure.cli.config import Config
from tenure.core.errors import UsageError

if TYPE_CHECKING:
    from tenure.vault import KekRing


def open_ring(config: Config) -> KekRing:
    """`vault.kms` names a function that returns a ring; else `vault.keys` holds one."""
    hook, keys = config.text("vault.kms"), config.text("vault.keys")
    if hook:
        return _hooked(hook)
    if not keys:
        raise UsageError(
            "there is no key ring: set TENURE_VAULT_KEYS_FILE to a file with a line of "
            "`tenure keys new-kek`, or vault.kms to a function that makes one"
        )
    from tenure.vault import read_ring

    return read_ring(keys)


Seal = Callable[[bytes, str, str, int], Awaitable[Mapping[str, Any]]]
"""Credentials, and the job, requester and version they are for, to the job's four columns."""


def open_seal(config: Config) -> Seal | None:
    """What a gateway seals credentials with; None where no key ring is set."""
    if not config.is_set("vault.kms") and not config.is_set("vault.keys"):
        return None
    from tenure.vault import Binding, Secret, Vault

    vault = Vault(open_ring(config))

    async def seal(plain: bytes, job_id: str, requester: str, version: int) -> Mapping[str, Any]:
        sealed = await vault.seal(Secret(plain), Binding(job_id, requester, version))
        return {
            "storage_creds_encrypted": sealed.encrypted,
            "storage_creds_dek_wrapped": sealed.dek_wrapped,
            "storage_creds_kek_id": sealed.kek_id,
            "storage_creds_encryption_version": sealed.encryption_version,
        }

    return seal


def _hooked(hook: str) -> KekRing:
    name, _, function = hook.partition(":")
    try:
        made = getattr(importlib.import_module(name), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"vault.kms is {hook!r}, and it cannot be used: {error}") from None
    missing = [word for word in ("active_id", "wrap", "unwrap") if not hasattr(made, word)]
    if missing:
        raise UsageError(f"what {hook} returned is no key ring: it lacks {', '.join(missing)}")
    return cast("KekRing", made)
