"""Lease tokens: what proves a claim, made so that every plane of a database can make them again.

A claim has a nonce: chance, or what its `claim_id` leads to. The token is the nonce and a mark of
the stream under the planes' common secret. So a claim that is sent again, to whichever plane, finds
its leases; and a token is good for the stream it was given for and no other.
"""

from __future__ import annotations

import hmac
import secrets
from functools import lru_cache

from tenure.core.errors import StoreError
from tenure.sql.engine import PLANE, Engine

_NONCE_CHARS = 32
_MARK_CHARS = 16
_TRIES = 5
_TOKENS_KEPT = 4096


class Tokens:
    """Tokens of one database."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        # The leases of one claim share their token, and come back one by one.
        self.token = lru_cache(maxsize=_TOKENS_KEPT)(self._token)

    def nonce(self, requester: str, worker_id: str, claim_id: str) -> str:
        """The nonce of a claim; of one without an id a new one each time."""
        if not claim_id:
            return secrets.token_hex(_NONCE_CHARS // 2)
        return self._mark("claim", requester, worker_id, claim_id)[:_NONCE_CHARS]

    def _token(self, stream: str, nonce: str) -> str:
        """The token of a claim's leases in one stream."""
        return nonce + self._mark("stream", stream, nonce)[:_MARK_CHARS]

    def is_of(self, stream: str, token: str) -> bool:
        """Whether a token was given for this stream."""
        return hmac.compare_digest(
            self.token(stream, token[:_NONCE_CHARS]).encode(), token.encode()
        )

    def _mark(self, *parts: str) -> str:
        # Lengths keep ("a", "bc") and ("ab", "c") apart.
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.digest(self._secret, text.encode(), "sha256").hex()


async def read_tokens(engine: Engine) -> Tokens:
    """Tokens under the secret that the database holds; chosen now if there is none."""
    for _ in range(_TRIES):
        rows = await engine.run(PLANE, "plane_secret", fresh=secrets.token_hex(32))
        if rows:
            return Tokens(rows[0]["secret"])
    raise StoreError("the planes' common secret could not be read", contract="plane")
