"""What a webhook carries, as receivers see it; the database writes it with the step it tells of."""

from __future__ import annotations

from typing import Any

import msgspec


class WebhookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a job. `event_id` is the same at every delivery: do the effect once by it.

    `seq` counts 1, 2, 3 ... within the job. `outputs` come with `succeeded`, `error` with `failed`
    and `dead_letter`, `progress` where the handler reported some.
    """

    event_id: str
    job_id: str
    seq: int
    status: str
    previous_status: str
    task: str
    attempt: int
    max_attempts: int
    occurred_ms: int
    outputs: Any = msgspec.UNSET
    error: Any = msgspec.UNSET
    progress: Any = msgspec.UNSET


class WebhookHeaders(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What a delivery is verified by; see `tenure.webhooks.verify`."""

    x_euterpe_signature: str
    x_euterpe_timestamp: str
    x_euterpe_nonce: str
    x_euterpe_event_id: str
