"""Outbound HTTP that strangers may aim: webhooks, credential refreshes, sources, object storage.

Whoever submits a job chooses where these requests go, so each goes through one guard. A URL is read
once (`target`), its host is resolved once, every address found must be a public one or on the
operator's allow list (`guard`, `ranges`), and the connection is made to the very address that was
checked (`client`); nobody asks the name server a second time, and no redirect is followed. Each
exchange has a deadline and a byte limit. Libraries that bring their own HTTP client are led
through `proxy`, which does the same for them.
"""

from tenure.egress.client import Client, Limits, Response
from tenure.egress.guard import (
    Disconnected,
    EgressError,
    Guard,
    Policy,
    Refused,
    Target,
    TimedOut,
    TooLarge,
    Unguarded,
    Unreachable,
    read_target,
)
from tenure.egress.proxy import GuardedProxy

__all__ = [
    "Client",
    "Disconnected",
    "EgressError",
    "Guard",
    "GuardedProxy",
    "Limits",
    "Policy",
    "Refused",
    "Response",
    "Target",
    "TimedOut",
    "TooLarge",
    "Unguarded",
    "Unreachable",
    "read_target",
]
