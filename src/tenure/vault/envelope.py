"""Envelope encryption with AES-256-GCM, in the four columns that the inbox contract names.

Both the blob and its wrapped key are `nonce (12 bytes) + ciphertext + tag (16 bytes)`. A data key
encrypts exactly one blob, so its nonce can never meet another one. What the encryption is bound to
is written with a length before each part: joined by a separator, two jobs could read alike.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, field, replace

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tenure.vault.errors import CannotOpen, VaultError
from tenure.vault.ring import KekRing
from tenure.vault.secret import Secret

ENCRYPTION_VERSION = 1
_KEY_BYTES = 32
_NONCE_BYTES = 12
_BLOB = b"tenure.vault.blob.1"
_WRAP = b"tenure.vault.wrap.1"


@dataclass(frozen=True, slots=True)
class Binding:
    """What a sealed credential belongs to."""

    job_id: str
    requester_id: str
    credential_version: int

    def associated_data(self, purpose: bytes, *more: str) -> bytes:
        """Every part with its length before it, so that no two bindings read alike."""
        own = (self.job_id, self.requester_id, str(self.credential_version), *more)
        parts = [purpose, *(part.encode() for part in own)]
        return b"".join(struct.pack(">I", len(part)) + part for part in parts)


@dataclass(frozen=True, slots=True)
class Sealed:
    """The four columns: `storage_creds_` and the name of the field."""

    encrypted: bytes = field(repr=False)
    dek_wrapped: bytes = field(repr=False)
    kek_id: str
    encryption_version: int = ENCRYPTION_VERSION


class Vault:
    """Seals and opens with the keys of a ring."""

    def __init__(self, ring: KekRing) -> None:
        self._ring = ring

    @property
    def active_kek_id(self) -> str:
        """The key under which new things are sealed."""
        return self._ring.active_id

    async def seal(self, plaintext: Secret, binding: Binding) -> Sealed:
        """Encrypt under a fresh data key, and wrap that under the ring's active key."""
        dek = secrets.token_bytes(_KEY_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        bound = binding.associated_data(_BLOB)
        encrypted = nonce + AESGCM(dek).encrypt(nonce, plaintext.reveal(), bound)
        kek_id = self._ring.active_id
        wrapped = await self._ring.wrap(kek_id, dek, binding.associated_data(_WRAP, kek_id))
        return Sealed(encrypted, wrapped, kek_id)

    async def open(self, sealed: Sealed, binding: Binding) -> Secret:
        """The plaintext, or `CannotOpen` when anything does not belong together."""
        dek = await self._data_key(sealed, binding)
        nonce, ciphertext = sealed.encrypted[:_NONCE_BYTES], sealed.encrypted[_NONCE_BYTES:]
        try:
            opened = AESGCM(dek).decrypt(nonce, ciphertext, binding.associated_data(_BLOB))
        except (InvalidTag, ValueError):
            raise CannotOpen(
                f"the credentials of job {binding.job_id} do not open as version "
                f"{binding.credential_version}: blob and row do not belong together"
            ) from None
        return Secret(opened)

    async def rewrap(self, sealed: Sealed, binding: Binding) -> Sealed:
        """The same ciphertext with its data key wrapped under the active key."""
        dek = await self._data_key(sealed, binding)
        kek_id = self._ring.active_id
        wrapped = await self._ring.wrap(kek_id, dek, binding.associated_data(_WRAP, kek_id))
        return replace(sealed, dek_wrapped=wrapped, kek_id=kek_id)

    async def _data_key(self, sealed: Sealed, binding: Binding) -> bytes:
        if sealed.encryption_version != ENCRYPTION_VERSION:
            raise VaultError(
                f"job {binding.job_id}: sealed in format {sealed.encryption_version}; this "
                f"Tenure reads {ENCRYPTION_VERSION}"
            )
        bound = binding.associated_data(_WRAP, sealed.kek_id)
        return await self._ring.unwrap(sealed.kek_id, sealed.dek_wrapped, bound)
