"""Outbound HTTP to addresses that requesters choose: webhooks, refreshes, sources, object storage.

Requesters choose these addresses, so every request passes one guard against SSRF. A URL is parsed
once and its host is resolved once. Every address must be public or on the operator's allow list
(`guard`). The connection is made to the checked address itself (`client`): there is no second
lookup, and redirects are not followed. Each exchange has a deadline and a byte limit. Libraries
with their own HTTP client use `proxy`, which does the same for them.
"""

from tenure.egress.client import Client, Limits, Response
from tenure.egress.guard import (
    Disconnected,
    EgressError,
    Guard,
    Policy,
    RequestRefused,
    RequestTimedOut,
    Target,
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
    "RequestRefused",
    "RequestTimedOut",
    "Response",
    "Target",
    "TooLarge",
    "Unguarded",
    "Unreachable",
    "read_target",
]
