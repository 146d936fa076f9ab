"""Credential refresh (inbox contract, section 7), after a storage has answered 401 or 403.

1. The job's refresh counter is increased. It is a separate counter with its own limit.
2. A signed request is sent to `refresh_url`, with the same four headers as a webhook.
3. The requester stores new credentials through the API and answers 2xx, or sends them in its
   response as `{"credentials": {...}}`; then they are sealed and stored here under the fence.
4. The job is read again. It continues only with a version above the refused one.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tenure.core.lease import Lease
from tenure.core.outcome import Fatal, Retry
from tenure.egress import Client, EgressError, Limits, RequestRefused, Response
from tenure.vault import Binding, CredentialStore, Secret, StoredCredentials, Vault
from tenure.webhooks.deliver import signal_of
from tenure.webhooks.signing import (
    EndpointSecrets,
    KeyRotation,
    live_keys,
    new_nonce,
    signed_headers,
)

LIMITS = Limits(connect_ms=5_000, total_ms=20_000, body_bytes_max=65_536)


@dataclass(frozen=True, slots=True)
class RefreshSettings:
    """`attempts_max` is per job; `wait_ms` is the time for the requester's API call."""

    attempts_max: int = 5
    wait_ms: int = 30_000
    poll_ms: int = 200
    poll_ms_max: int = 2_000


class Refresher:
    """Gets newer credentials for a job under its lease."""

    def __init__(
        self,
        client: Client,
        secrets: EndpointSecrets,
        store: CredentialStore,
        vault: Vault,
        *,
        settings: RefreshSettings | None = None,
    ) -> None:
        self._client = client
        self._secrets = secrets
        self._store = store
        self._vault = vault
        self._settings = settings or RefreshSettings()
        self._rotation = KeyRotation()

    async def refresh(self, lease: Lease, refused_version: int) -> StoredCredentials:
        """Credentials of a version above the refused one; raises a signal that ends the attempt."""
        while True:
            stored = await self._store.read(lease)
            if stored.version > refused_version:
                return stored  # the requester replaced them while the old ones were in use
            count = await self._store.count_refresh(lease)
            if count > self._settings.attempts_max:
                raise Fatal(
                    f"storage refuses the credentials (version {refused_version}), and "
                    f"{self._settings.attempts_max} refreshes brought no newer ones",
                    code="credentials_refused",
                )
            if not stored.refresh_url:
                raise Fatal(
                    "storage refuses the credentials, and the job names no refresh_url",
                    code="credentials_refused",
                )
            answer = await self._request(stored)
            if await self._store_credentials(lease, stored, answer):
                continue
            await self._wait(lease, refused_version)

    async def _request(self, stored: StoredCredentials) -> Response:
        bound = stored.binding
        live = await live_keys(self._secrets, bound.requester_id)
        if not live:
            raise Fatal("the requester has no secret to sign a refresh with", code="no_secret")
        event_id = str(uuid.uuid4())
        body = msgspec.json.encode(
            {
                "type": "credentials.refresh",
                "event_id": event_id,
                "job_id": bound.job_id,
                "credential_version": bound.credential_version,
            }
        )

        async def send(keys: Sequence[bytes]) -> Response:
            headers = signed_headers(
                keys,
                event_id=event_id,
                body=body,
                now_s=int(time.time()),
                nonce=new_nonce(),
            )
            headers.append(("Content-Type", "application/json"))
            return await self._client.send(
                "POST", stored.refresh_url, headers=headers, body=body, limits=LIMITS
            )

        try:
            answer = await self._rotation.send(bound.requester_id, live, send)
        except RequestRefused as error:
            raise Fatal(f"no refresh: {error}", code=error.code) from None
        except EgressError as error:
            raise Retry(None, f"no refresh: {error}", code=error.code) from None
        signal = signal_of(
            answer.status,
            answer.headers,
            attempt=max(stored.refreshes, 1),
            jitter=random.random(),
            now_s=time.time(),
        )
        if signal is not None:
            raise signal
        return answer

    async def _store_credentials(
        self, lease: Lease, stored: StoredCredentials, answer: Response
    ) -> bool:
        """Store the credentials of the response; False if it has none."""
        credentials = _credentials(answer)
        if credentials is None:
            return False
        old = stored.binding
        bound = Binding(old.job_id, old.requester_id, old.credential_version + 1)
        sealed = await self._vault.seal(credentials, bound)
        # If this returns False, the API was faster, and the next read finds its credentials.
        await self._store.replace(lease, seen_version=old.credential_version, sealed=sealed)
        return True

    async def _wait(self, lease: Lease, refused_version: int) -> None:
        """Poll until the requester has called the API, with growing pauses, up to `wait_ms`."""
        settings = self._settings
        pause_ms, waited_ms = settings.poll_ms, 0
        while waited_ms < settings.wait_ms:
            if (await self._store.read(lease)).version > refused_version:
                return
            await asyncio.sleep(pause_ms / 1000)
            waited_ms += pause_ms
            pause_ms = min(pause_ms * 2, settings.poll_ms_max)


def _credentials(answer: Response) -> Secret | None:
    """The member `credentials` of the response as JSON text; None without one."""
    if answer.truncated:
        raise Fatal(
            f"the refresh answer is longer than {LIMITS.body_bytes_max} bytes", code="too_large"
        )
    try:
        decoded: Any = msgspec.json.decode(answer.body) if answer.body.strip() else None
    except msgspec.DecodeError:
        return None
    found = decoded.get("credentials") if isinstance(decoded, dict) else None
    return Secret(msgspec.json.encode(found)) if isinstance(found, dict) else None
