"""Sealed credentials of a job, as a worker reads and replaces them.

The contract that keeps them implements `CredentialStore`; every call carries the lease, and one
whose claim is no longer the current one is answered with `LeaseLost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tenure.core.lease import Lease
from tenure.vault.envelope import Binding, Sealed


@dataclass(frozen=True, slots=True)
class StoredCredentials:
    """A job's credentials at rest. `sealed` is None for a job that needs none (signed URLs)."""

    binding: Binding
    sealed: Sealed | None
    refresh_url: str = ""
    refreshes: int = 0

    @property
    def version(self) -> int:
        """The credential version; it only ever rises."""
        return self.binding.credential_version


class CredentialStore(Protocol):
    """The columns of one job, guarded by its lease."""

    async def read(self, lease: Lease) -> StoredCredentials:
        """What is stored now; raises `LeaseLost` when the claim is not the current one."""

    async def replace(self, lease: Lease, *, seen_version: int, sealed: Sealed) -> bool:
        """Put new columns in place and raise the version by one, in one step.

        False when the version is no longer the one seen: somebody else refreshed, read again.
        """

    async def count_refresh(self, lease: Lease) -> int:
        """Add one to the job's refresh attempts (a counter of its own) and return the sum."""
