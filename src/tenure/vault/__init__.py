"""Secrets at rest: each credential under a key of its own, and that key under the operator's.

A blob is encrypted once, with a data key (DEK) made for it alone; the DEK is wrapped by a key of
the ring (KEK), and only the wrapping changes when the operator rotates keys. Both encryptions are
bound to the job, its requester and the credential's version, so that a row copied elsewhere does
not open. Start at `envelope`; `ring` holds the keys, `rotation` moves wrappings to a new one.
Plaintext exists in the memory of the worker that needs it, wrapped in `Secret`.
"""

from tenure.vault.envelope import Binding, Sealed, Vault
from tenure.vault.errors import CannotOpen, UnknownKek, VaultError
from tenure.vault.ring import KekRing, LocalRing, new_kek, read_ring
from tenure.vault.rotation import Rotation, WrappedKey, WrappedKeys, rotate
from tenure.vault.secret import Secret, without_secrets

__all__ = [
    "Binding",
    "CannotOpen",
    "KekRing",
    "LocalRing",
    "Rotation",
    "Sealed",
    "Secret",
    "UnknownKek",
    "Vault",
    "VaultError",
    "WrappedKey",
    "WrappedKeys",
    "new_kek",
    "read_ring",
    "rotate",
    "without_secrets",
]
