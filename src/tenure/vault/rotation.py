"""Moves every wrapped data key to the ring's active key, while the queue goes on.

Ciphertexts are not read and not written. Each swap names what it saw (version, key id, wrapping),
so a credential that was refreshed meanwhile keeps its newer wrapping, a second rotation beside this
one does no harm, and one that was killed is simply run again. A key may leave the ring when no row
names it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tenure.vault.envelope import Binding, Sealed, Vault
from tenure.vault.errors import VaultError

_PASSES_MAX = 100


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """What a rotation sees of a row: all but the ciphertext."""

    binding: Binding
    kek_id: str
    dek_wrapped: bytes = field(repr=False)
    encryption_version: int = 1


class WrappedKeys(Protocol):
    """The store's side of a rotation."""

    async def page(self, *, not_under: str, after: str, limit: int) -> Sequence[WrappedKey]:
        """Rows under another key than this one with a job id after `after`, in order of it."""

    async def swap(self, pairs: Sequence[tuple[WrappedKey, WrappedKey]]) -> int:
        """Replace key id and wrapping where version, key id and wrapping are as seen; how many."""

    async def counts(self) -> Mapping[str, int]:
        """Rows by key id."""

    async def close(self) -> None:
        """Let go of the store."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a rotation did; `left` counts the rows by key id, and `unopened` names jobs."""

    rewrapped: int
    left: Mapping[str, int]
    unopened: tuple[str, ...] = ()


async def rotate(rows: WrappedKeys, vault: Vault, *, batch: int = 500) -> Rotation:
    """Rewrap until no row that can be opened is left under another key."""
    rewrapped = 0
    unopened: list[str] = []
    for _ in range(_PASSES_MAX):
        found, moved, unopened = await _pass(rows, vault, batch)
        rewrapped += moved
        if found == len(unopened):  # new rows and lost races are found by another pass
            break
    return Rotation(rewrapped, await rows.counts(), tuple(unopened))


async def _pass(rows: WrappedKeys, vault: Vault, batch: int) -> tuple[int, int, list[str]]:
    after, found, moved = "", 0, 0
    unopened: list[str] = []
    while page := await rows.page(not_under=vault.active_kek_id, after=after, limit=batch):
        found += len(page)
        after = page[-1].binding.job_id
        pairs = []
        for row in page:
            try:
                pairs.append((row, await _rewrapped(row, vault)))
            except VaultError:
                unopened.append(row.binding.job_id)
        moved += await rows.swap(pairs)
    return found, moved, unopened


async def _rewrapped(row: WrappedKey, vault: Vault) -> WrappedKey:
    sealed = Sealed(b"", row.dek_wrapped, row.kek_id, row.encryption_version)
    made = await vault.rewrap(sealed, row.binding)
    return WrappedKey(row.binding, made.kek_id, made.dek_wrapped, row.encryption_version)
