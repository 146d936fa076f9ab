"""Values that nobody should read over a shoulder: masked by key, and put back when replayed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MASK = "•••"
USUAL = (
    *("password", "passwd", "passphrase", "secret", "token", "api_key", "apikey", "authorization"),
    *("access_key", "private_key", "credential", "cookie", "session_id"),
)


class Redaction:
    """Masks the values of keys that contain one of `words`; case and - or _ do not matter."""

    def __init__(self, words: Iterable[str] = USUAL) -> None:
        parts = [re.escape(_flat(word)) for word in words if word.strip()]
        self._pattern = re.compile("|".join(parts)) if parts else None

    def is_secret(self, key: str) -> bool:
        """Whether the value of this key is masked."""
        return self._pattern is not None and self._pattern.search(_flat(key)) is not None

    def masked(self, value: Any) -> Any:
        """The value with secrets masked, at any depth; the original stays as it is."""
        if isinstance(value, dict):
            return {
                key: MASK if self.is_secret(str(key)) and inner else self.masked(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self.masked(inner) for inner in value]
        return value

    def restored(self, edited: Any, original: Any) -> Any:
        """What was masked and left alone gets its own value back."""
        if isinstance(edited, dict):
            known = original if isinstance(original, dict) else {}
            return {
                key: known[key]
                if inner == MASK and key in known
                else self.restored(inner, known.get(key))
                for key, inner in edited.items()
            }
        if isinstance(edited, list):
            others = original if isinstance(original, list) else []
            padded = [*others, *[None] * (len(edited) - len(others))]
            return [
                self.restored(inner, other) for inner, other in zip(edited, padded, strict=False)
            ]
        return edited


def _flat(text: str) -> str:
    return re.sub(r"[-_\s]", "", text).lower()
