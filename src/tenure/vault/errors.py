"""What can go wrong with sealed things.

VaultError
├── CannotOpen     the blob, its wrapping or what it is bound to was changed
└── UnknownKek     the ring does not hold the key that wrapped it
"""

from __future__ import annotations

from tenure.core.errors import TenureError


class VaultError(TenureError):
    """Root of what the vault raises. No message holds key material or plaintext."""

    code = "vault"


class CannotOpen(VaultError):
    """Nothing comes out: the ciphertext and what it was bound to do not belong together."""

    code = "cannot_open"


class UnknownKek(VaultError):
    """The key was retired too early, or this process was not given it."""

    code = "unknown_kek"
