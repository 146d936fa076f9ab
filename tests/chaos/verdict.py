"""The history checker under the name that the tests know; it is `leasehold.core.verdict`."""

from leasehold.core.fold import BY_HOLDER, Violation
from leasehold.core.verdict import INVARIANTS, Verdict, check
from leasehold.core.witness import Fault, Observation, Snapshot

__all__ = [
    "BY_HOLDER",
    "INVARIANTS",
    "Fault",
    "Observation",
    "Snapshot",
    "Verdict",
    "Violation",
    "check",
]
