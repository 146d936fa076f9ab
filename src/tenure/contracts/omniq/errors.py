"""OmniQ's own errors, as types of the one tree.

LeaseLost
├── NotActive          NOT_ACTIVE: the job is leased to nobody
└── TokenMismatch      TOKEN_MISMATCH: it is leased, or was ended, under another token
InvalidJob
├── PayloadType        the payload is no JSON object or array (a TypeError, too)
└── PayloadValue       it cannot be written as JSON (a ValueError, too)
Conflict
└── Refused            an administrator's call that the job's state forbids; `word` is OmniQ's
"""

from __future__ import annotations

from tenure.contracts.omniq.options import CONTRACT
from tenure.core.errors import Conflict, InvalidJob, LeaseLost


class NotActive(LeaseLost):
    """The job is leased to nobody: its lease ran out and was taken back."""

    code = "NOT_ACTIVE"


class TokenMismatch(LeaseLost):
    """The token is not the job's: another holds it, or it has ended, or it is gone."""

    code = "TOKEN_MISMATCH"


class PayloadType(InvalidJob, TypeError):
    """The payload is no JSON object or array."""


class PayloadValue(InvalidJob, ValueError):
    """The payload holds something that JSON has no word for."""


class OptionValue(InvalidJob, ValueError):
    """An option of `publish` that cannot be."""


class Refused(Conflict):
    """OmniQ's word for why not stands in `word`: NO_JOB, NOT_FAILED, ACTIVE, LANE_MISMATCH ..."""

    def __init__(self, operation: str, subject: str, word: str) -> None:
        super().__init__(
            f"{operation} of {subject}: {word}", contract=CONTRACT, operation=operation, reply=word
        )
        self.word = word


_REASONS = {
    "NOT_ACTIVE": "NOT_ACTIVE: the job is not leased to anybody",
    "TOKEN_REQUIRED": "TOKEN_MISMATCH: no lease token was given",
    "TOKEN_MISMATCH": "TOKEN_MISMATCH: another token holds the job, or it has ended",
}


def lost(job_id: str, word: bytes) -> LeaseLost:
    """The seam's value for OmniQ's word."""
    return LeaseLost(job_id, _REASONS[word.decode()])


def refusal(job_id: str, word: bytes) -> LeaseLost:
    """The contract's error for OmniQ's word, to be raised."""
    kind = NotActive if word == b"NOT_ACTIVE" else TokenMismatch
    return kind(job_id, _REASONS[word.decode()])
