"""Envelope encryption of credentials, the key ring, and key rotation.

Each credential is encrypted with its own data key (DEK). The DEK is wrapped by a key of the
operator's ring (KEK), and a rotation changes only this wrapping. Both encryptions are bound to the
job, its requester and the credential's version, so that a row copied elsewhere cannot be decrypted.
Plaintext exists only in the memory of the worker that needs it, as a `Secret`.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tenure.core.errors import TenureError, UsageError
from tenure.core.lease import Lease

_HIDDEN = "***"

_URL_SECRETS = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?:[^\s/@'\"<>]*@)?"
    r"(?P<rest>[^\s?'\"<>]*)(?P<query>\?[^\s'\"<>]*)?",
    re.IGNORECASE,
)
_CHARS_MIN = 6


class Secret:
    """Text or bytes that print as `***`. Only `reveal` and `text` return the value.

    >>> Secret("hunter2"), f"{Secret('hunter2')}"
    (Secret(***), '***')
    """

    __slots__ = ("_value",)

    def __init__(self, value: str | bytes) -> None:
        self._value = value.encode() if isinstance(value, str) else bytes(value)

    def reveal(self) -> bytes:
        """The value. Pass it directly to the call that needs it; do not keep it."""
        return self._value

    def text(self) -> str:
        """The value as text."""
        return self._value.decode()

    def __repr__(self) -> str:
        return f"Secret({_HIDDEN})"

    def __str__(self) -> str:
        return _HIDDEN

    def __format__(self, _spec: str) -> str:
        return _HIDDEN

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(
            (Secret, len(self._value))
        )  # equal for equal secrets, and reveals only the length

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not pickled: it stays in the process that opened it")


def without_secrets(text: str, secrets: Iterable[Secret] = ()) -> str:
    """The text with known secrets, URL queries and user names hidden, for logs and stores.

    >>> without_secrets("GET https://u:p@h.example/a?X-Amz-Signature=abc failed")
    'GET https://h.example/a?*** failed'
    """
    return _URL_SECRETS.sub(_hide_url, hide(text, secrets))


def hide(text: str, secrets: Iterable[Secret]) -> str:
    """The text with these secrets hidden."""
    for secret in secrets:
        plain = secret.reveal().decode(errors="replace")
        if len(plain) >= _CHARS_MIN:  # shorter ones occur in ordinary words
            text = text.replace(plain, _HIDDEN)
    return text


def _hide_url(match: re.Match[str]) -> Any:
    return match["scheme"] + match["rest"] + (f"?{_HIDDEN}" if match["query"] else "")


class VaultError(TenureError):
    """Root of the vault's errors. No message contains key material or plaintext."""

    code = "vault"


class CannotOpen(VaultError):
    """Decryption failed: the ciphertext does not belong to this row or key."""

    code = "cannot_open"


class UnknownKek(VaultError):
    """The ring does not have the key: it was removed too early, or never configured here."""

    code = "unknown_kek"


_NONCE_BYTES = 12
_KEY_BYTES = 32
_ID = re.compile(r"[A-Za-z0-9._:/-]{1,120}")


class KekRing(Protocol):
    """Wraps and unwraps data keys; a KMS client can implement it."""

    @property
    def active_id(self) -> str:
        """The key that wraps new data keys."""

    async def wrap(self, kek_id: str, dek: bytes, associated_data: bytes) -> bytes:
        """Encrypt a data key, bound to `associated_data`."""

    async def unwrap(self, kek_id: str, wrapped: bytes, associated_data: bytes) -> bytes:
        """Decrypt a data key; raises `UnknownKek` or `CannotOpen`."""


class LocalRing:
    """Keys in memory. The first one is active, the others decrypt older credentials."""

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
    """Parse a ring: lines or a comma-separated list of `id=base64`; `#` starts a comment."""
    keys: dict[str, Secret] = {}
    for part in re.split(r"[\n,]", text):
        entry = part.partition("#")[0].strip()
        if not entry:
            continue
        kek_id, _, coded = entry.partition("=")
        if kek_id in keys:
            raise UsageError(f"the key ring names {kek_id!r} twice")
        keys[kek_id] = Secret(_decode_key(kek_id, coded))
    return LocalRing(keys)


def new_kek(kek_id: str) -> str:
    """A new key as a line for the ring."""
    if not _ID.fullmatch(kek_id):
        raise UsageError(f"{kek_id!r} is not a key id; use letters, digits and . _ : / -")
    return f"{kek_id}={base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()}"


def _decode_key(kek_id: str, coded: str) -> bytes:
    try:
        return base64.b64decode(coded.strip(), validate=True)
    except (binascii.Error, ValueError):
        # Not the text itself: it may be a key with a typing error.
        raise UsageError(f"key ring: an entry ({kek_id[:40]!r}) is not `id=base64`") from None


_ENCRYPTION_VERSION = 1
_BLOB = b"tenure.vault.blob.1"
_WRAP = b"tenure.vault.wrap.1"


@dataclass(frozen=True, slots=True)
class Binding:
    """The identity to which an encrypted credential is bound."""

    job_id: str
    requester_id: str
    credential_version: int

    def associated_data(self, purpose: bytes, *more: str) -> bytes:
        """All parts, each preceded by its length, so that no two bindings give the same bytes."""
        own = (self.job_id, self.requester_id, str(self.credential_version), *more)
        parts = [purpose, *(part.encode() for part in own)]
        return b"".join(struct.pack(">I", len(part)) + part for part in parts)


@dataclass(frozen=True, slots=True)
class Sealed:
    """An encrypted credential: the four columns `storage_creds_*`."""

    encrypted: bytes = field(repr=False)
    dek_wrapped: bytes = field(repr=False)
    kek_id: str
    encryption_version: int = _ENCRYPTION_VERSION


class Vault:
    """Encrypts (seals) and decrypts (opens) credentials with the keys of a ring."""

    def __init__(self, ring: KekRing) -> None:
        self._ring = ring

    @property
    def active_kek_id(self) -> str:
        """The key that wraps the data keys of new credentials."""
        return self._ring.active_id

    async def seal(self, plaintext: Secret, binding: Binding) -> Sealed:
        """Encrypt with a new data key, and wrap that with the active key of the ring."""
        dek = secrets.token_bytes(_KEY_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        bound = binding.associated_data(_BLOB)
        encrypted = nonce + AESGCM(dek).encrypt(nonce, plaintext.reveal(), bound)
        kek_id = self._ring.active_id
        wrapped = await self._ring.wrap(kek_id, dek, binding.associated_data(_WRAP, kek_id))
        return Sealed(encrypted, wrapped, kek_id)

    async def open(self, sealed: Sealed, binding: Binding) -> Secret:
        """Decrypt; raises `CannotOpen` if ciphertext, binding and key do not match."""
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
        """The same ciphertext, its data key wrapped with the active key."""
        dek = await self._data_key(sealed, binding)
        kek_id = self._ring.active_id
        wrapped = await self._ring.wrap(kek_id, dek, binding.associated_data(_WRAP, kek_id))
        return replace(sealed, dek_wrapped=wrapped, kek_id=kek_id)

    async def _data_key(self, sealed: Sealed, binding: Binding) -> bytes:
        if sealed.encryption_version != _ENCRYPTION_VERSION:
            raise VaultError(
                f"job {binding.job_id}: sealed in format {sealed.encryption_version}; this "
                f"Tenure reads {_ENCRYPTION_VERSION}"
            )
        bound = binding.associated_data(_WRAP, sealed.kek_id)
        return await self._ring.unwrap(sealed.kek_id, sealed.dek_wrapped, bound)


@dataclass(frozen=True, slots=True)
class StoredCredentials:
    """A job's stored credentials. `sealed` is None for a job without any (signed URLs)."""

    binding: Binding
    sealed: Sealed | None
    refresh_url: str = ""
    refreshes: int = 0

    @property
    def version(self) -> int:
        """The credential version, which only increases."""
        return self.binding.credential_version


class CredentialStore(Protocol):
    """The credentials of one job, accessed under its lease."""

    async def read(self, lease: Lease) -> StoredCredentials:
        """The current credentials; raises `LeaseLost` if the lease is not the current one."""

    async def replace(self, lease: Lease, *, seen_version: int, sealed: Sealed) -> bool:
        """Replace the credentials and increase the version by one, atomically.

        False if the version is not `seen_version` any more: read the newer credentials.
        """

    async def count_refresh(self, lease: Lease) -> int:
        """Increase the job's counter of refresh attempts and return it."""


_PASSES_MAX = 100


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """What a rotation reads of a row: all but the ciphertext."""

    binding: Binding
    kek_id: str
    dek_wrapped: bytes = field(repr=False)
    encryption_version: int = 1


class WrappedKeys(Protocol):
    """The rows of a store, for a rotation."""

    async def page(self, *, not_under: str, after: str, limit: int) -> Sequence[WrappedKey]:
        """Rows wrapped by other keys than `not_under`, after a job id, ordered by job id."""

    async def swap(self, pairs: Sequence[tuple[WrappedKey, WrappedKey]]) -> int:
        """Replace the wrapping of rows that are unchanged since they were read; their number."""

    async def counts(self) -> Mapping[str, int]:
        """The number of rows by key id."""

    async def close(self) -> None:
        """Close the store."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The result of a rotation: `left` counts rows by key id, `unopened` has job ids."""

    rewrapped: int
    left: Mapping[str, int]
    unopened: tuple[str, ...] = ()


async def rotate(rows: WrappedKeys, vault: Vault, *, batch: int = 500) -> Rotation:
    """Rewrap until no row that can be decrypted is wrapped by another key."""
    rewrapped = 0
    unopened: list[str] = []
    for _ in range(_PASSES_MAX):
        found, moved, unopened = await _pass(rows, vault, batch)
        rewrapped += moved
        if found == len(unopened):  # otherwise another pass finds new rows and lost races
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
                pairs.append((row, await _rewrap_row(row, vault)))
            except VaultError:
                unopened.append(row.binding.job_id)
        moved += await rows.swap(pairs)
    return found, moved, unopened


async def _rewrap_row(row: WrappedKey, vault: Vault) -> WrappedKey:
    sealed = Sealed(b"", row.dek_wrapped, row.kek_id, row.encryption_version)
    new = await vault.rewrap(sealed, row.binding)
    return WrappedKey(row.binding, new.kek_id, new.dek_wrapped, row.encryption_version)
