"""Credential refresh (section 7): storage said 401 or 403, so the requester is asked for new ones.

1. The job's refresh counter goes up by one; it is its own counter and has its own limit.
2. A signed request goes to `refresh_url`, with the same four headers as a webhook.
3. The requester puts new credentials in place through the API and answers 2xx, or sends them along
   in its answer as `{"credentials": {...}}`, and they are sealed and stored here under the fence.
4. The job is read again. Only a version above the one that was refused lets the work go on.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tenure.core.lease import Lease
from tenure.core.outcome import Fatal, Retry
from tenure.egress import Client, EgressError, Limits, Refused, Response
from tenure.vault import Binding, CredentialStore, Secret, StoredCredentials, Vault
from tenure.webhooks.deliver import signal_of
from tenure.webhooks.signing import EndpointSecrets, Rotating, live_keys, new_nonce, signed_headers

LIMITS = Limits(connect_ms=5_000, total_ms=20_000, body_bytes_max=65_536)


@dataclass(frozen=True, slots=True)
class RefreshSettings:
    """`attempts_max` counts over a job's whole life; `wait_ms` is for the requester's API call."""

    attempts_max: int = 5
    wait_ms: int = 30_000
    look_ms: int = 200
    look_ms_max: int = 2_000


class Refresher:
    """Gets newer credentials for a job whose lease is held."""

    def __init__(
        self,
        client: Client,
        secrets: EndpointSecrets,
        store: CredentialStore,
        vault: Vault,
        *,
        settings: RefreshSettings | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._secrets = secrets
        self._store = store
        self._vault = vault
        self._settings = settings or RefreshSettings()
        self._clock = clock
        self._rotating = Rotating()

    async def refresh(self, lease: Lease, refused_version: int) -> StoredCredentials:
        """Credentials of a version above the refused one, or a signal that ends the attempt."""
        while True:
            stored = await self._store.read(lease)
            if stored.version > refused_version:
                return stored  # they came by themselves while the old ones were in use
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
            answer = await self._ask(stored)
            if await self._take(lease, stored, answer):
                continue
            await self._wait(lease, refused_version)

    async def _ask(self, stored: StoredCredentials) -> Response:
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
                now_s=int(self._clock()),
                nonce=new_nonce(),
            )
            headers.append(("Content-Type", "application/json"))
            return await self._client.send(
                "POST", stored.refresh_url, headers=headers, body=body, limits=LIMITS
            )

        try:
            answer = await self._rotating.send(bound.requester_id, live, send)
        except Refused as error:
            raise Fatal(f"no refresh: {error}", code=error.code) from None
        except EgressError as error:
            raise Retry(None, f"no refresh: {error}", code=error.code) from None
        signal = signal_of(
            answer.status,
            answer.headers,
            attempt=max(stored.refreshes, 1),
            chance=random.random(),
            now_s=self._clock(),
        )
        if signal is not None:
            raise signal
        return answer

    async def _take(self, lease: Lease, stored: StoredCredentials, answer: Response) -> bool:
        """Store what the answer brought along, if it brought anything."""
        brought = _credentials(answer)
        if brought is None:
            return False
        old = stored.binding
        bound = Binding(old.job_id, old.requester_id, old.credential_version + 1)
        sealed = await self._vault.seal(brought, bound)
        # False means that the API was faster: its credentials count, and the next read finds them.
        await self._store.replace(lease, seen_version=old.credential_version, sealed=sealed)
        return True

    async def _wait(self, lease: Lease, refused_version: int) -> None:
        """Look until the requester has called the API, with growing pauses and an end."""
        chosen = self._settings
        pause_ms, waited_ms = chosen.look_ms, 0
        while waited_ms < chosen.wait_ms:
            if (await self._store.read(lease)).version > refused_version:
                return
            await asyncio.sleep(pause_ms / 1000)
            waited_ms += pause_ms
            pause_ms = min(pause_ms * 2, chosen.look_ms_max)


def _credentials(answer: Response) -> Secret | None:
    """The object under `credentials`, as the JSON text that will be sealed."""
    if answer.truncated:
        raise Fatal(
            f"the refresh answer is longer than {LIMITS.body_bytes_max} bytes", code="too_large"
        )
    try:
        said: Any = msgspec.json.decode(answer.body) if answer.body.strip() else None
    except msgspec.DecodeError:
        return None
    brought = said.get("credentials") if isinstance(said, dict) else None
    return Secret(msgspec.json.encode(brought)) if isinstance(brought, dict) else None
