"""The operator's keys: which wrap now, and which are still known.

`LocalRing` holds them in memory, read from a file or the environment as lines `id=base64`; the
first one is active. A KMS takes its place by offering the three names of `KekRing`: `wrap` and
`unwrap` then send the data key (32 bytes) and the associated data to the service, and `active_id`
names the key version there. The vault never asks for a KEK itself.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Mapping
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tenure.core.errors import UsageError
from tenure.vault.errors import CannotOpen, UnknownKek
from tenure.vault.secret import Secret

_NONCE_BYTES = 12
_KEY_BYTES = 32
_ID = re.compile(r"[A-Za-z0-9._:/-]{1,120}")


class KekRing(Protocol):
    """Wraps and unwraps data keys; a KMS client with these three names is a ring too."""

    @property
    def active_id(self) -> str:
        """The key under which new data keys are wrapped."""

    async def wrap(self, kek_id: str, dek: bytes, associated_data: bytes) -> bytes:
        """The data key, encrypted and bound to `associated_data`."""

    async def unwrap(self, kek_id: str, wrapped: bytes, associated_data: bytes) -> bytes:
        """The data key again; `UnknownKek` or `CannotOpen` when that cannot be."""


class LocalRing:
    """Keys in this process's memory. The first one is active, the others open what is older."""

    def __init__(self, keys: Mapping[str, Secret]) -> None:
        if not keys:
            raise UsageError("the key ring is empty; `tenure keys new-kek` makes a key")
        for kek_id, key in keys.items():
            if not _ID.fullmatch(kek_id) or len(key.reveal()) != _KEY_BYTES:
                raise UsageError(f"key {kek_id[:120]!r} needs a plain id and {_KEY_BYTES} bytes")
        self._active_id = next(iter(keys))
        self._ciphers = {kek_id: AESGCM(key.reveal()) for kek_id, key in keys.items()}

    @property
    def active_id(self) -> str:
        return self._active_id

    async def wrap(self, kek_id: str, dek: bytes, associated_data: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher(kek_id).encrypt(nonce, dek, associated_data)

    async def unwrap(self, kek_id: str, wrapped: bytes, associated_data: bytes) -> bytes:
        cipher = self._cipher(kek_id)
        try:
            return cipher.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], associated_data)
        except (InvalidTag, ValueError):
            raise CannotOpen(
                f"a key wrapped by {kek_id!r} does not open: it belongs to another row, or the "
                "ring holds another key under that id"
            ) from None

    def _cipher(self, kek_id: str) -> AESGCM:
        if kek_id not in self._ciphers:
            known = ", ".join(self._ciphers)
            raise UnknownKek(f"the key ring has no key {kek_id!r} (it has: {known})")
        return self._ciphers[kek_id]


def read_ring(text: str) -> LocalRing:
    """A ring from lines (or a comma separated list) of `id=base64`; `#` begins a comment."""
    keys: dict[str, Secret] = {}
    for part in re.split(r"[\n,]", text):
        entry = part.partition("#")[0].strip()
        if not entry:
            continue
        kek_id, _, coded = entry.partition("=")
        if kek_id in keys:
            raise UsageError(f"the key ring names {kek_id!r} twice")
        keys[kek_id] = Secret(_decoded(kek_id, coded))
    return LocalRing(keys)


def new_kek(kek_id: str) -> str:
    """A line for the ring with a fresh key."""
    if not _ID.fullmatch(kek_id):
        raise UsageError(f"{kek_id!r} is no key id; letters, digits and . _ : / - will do")
    return f"{kek_id}={base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()}"


def _decoded(kek_id: str, coded: str) -> bytes:
    try:
        return base64.b64decode(coded.strip(), validate=True)
    except (binascii.Error, ValueError):
        # Not the text itself: it may be a key with a slip of the pen.
        raise UsageError(f"key ring: an entry ({kek_id[:40]!r}) is not `id=base64`") from None
