"""The HTTP API: POST /transcode, GET /transcode/status, credentials and webhook secrets.

The gateway authenticates the caller, decodes the body and formats errors. For a caller, jobs of
other requesters do not exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from tenure.contracts.inbox.credentials import (
    Seal,
    SealedColumns,
    WebhookSecrets,
    sealed_columns,
)
from tenure.contracts.inbox.transcode_request import (
    Accepted,
    AskStatus,
    CreateTranscode,
    CredentialsView,
    NewCredentials,
    SecretView,
    TranscodeView,
    check_called,
    check_credentials,
    validate,
    view,
)
from tenure.core.endpoint import (
    Answer,
    Call,
    Endpoint,
    Handle,
    IdempotencyKey,
    Refused,
    Reply,
    Right,
    Submits,
    check_stored,
    idempotency_key,
)
from tenure.core.errors import Conflict, InvalidJob, NotFound
from tenure.core.job import JobRecord, NewJob, Submitted, request_hash
from tenure.core.redaction import Redaction
from tenure.core.transcode import StorageCredentials
from tenure.sql.sql_ledger import SqlLedger
from tenure.sql.submit import uuid7
from tenure.store.resend import submit_with_retry

_TASK = "transcode"
_JOB_ID = re.compile(r"[A-Za-z0-9_.@:-]{1,128}")
_REQUESTERS_MAX = 10_000
_EXAMPLE = {
    "source": {"url": "s3://media/in/clip.mov"},
    "outputs": [{"name": "720p.mp4", "format": "mp4", "height": 720}],
    "destination": {"url": "s3://media/out"},
    "status_webhook_url": "https://requester.example/hooks/transcode",
}


class _InboxRoutes:
    """The endpoints of one inbox. Without `seal` it accepts no credentials.

    `check_url` raises for an address that workers may not call, so that the requester learns of it
    at once; the worker checks again after resolving the name. `has_secret` says whether the
    operator's file has a webhook secret for a requester, `files` whether URLs may be `file://`.
    """

    def __init__(
        self,
        queue: Submits,
        ledger: SqlLedger,
        *,
        redaction: Redaction,
        seal: Seal | None = None,
        check_url: Callable[[str], object] = lambda url: None,
        has_secret: Callable[[str], bool] = lambda requester: False,
        files: bool = True,
    ) -> None:
        self._redaction = redaction
        self._queue = queue
        self._ledger = ledger
        self._seal = seal
        self._credentials = SealedColumns(ledger.engine)
        self._secrets = WebhookSecrets(ledger.engine)
        self._check_url = check_url
        self._has_secret = has_secret
        self._files = files
        self._with_secret: set[str] = set()
        self._keep_is_stored = False

    async def create(self, call: Call) -> Answer:
        """Store a job. Its id is made here, so that a submit may be sent again."""
        job = await self._new_job(call)
        (submitted,) = await submit_with_retry(self._queue, [job])
        check_stored(submitted)
        headers = [("location", f"/transcode/status?job_id={submitted.job_id}")]
        if submitted.job_id != job.job_id:
            headers.append(("idempotency-replayed", "true"))
        return Answer(202, _accepted(submitted), tuple(headers))

    async def status(self, call: Call) -> Answer:
        """The job as it is now."""
        record = await self._record(call, call.query.job_id)
        return Answer(200, view(await self._redaction.shown(record, call.caller)))

    async def refresh(self, call: Call) -> Answer:
        """Newer credentials for a job that is not finished."""
        body: NewCredentials = call.body
        record = await self._record(call, body.job_id)
        if self._seal is None:
            raise _no_ring("credentials")
        check_credentials(body.credentials, self._check_url)
        version = body.credential_version
        secret = msgspec.json.encode(body.credentials)
        sealed = await self._seal(secret, record.job_id, record.requester, version + 1)
        columns = sealed_columns(sealed)
        if not await self._credentials.put(record.job_id, record.requester, version, columns):
            raise Conflict(
                "the job has ended, or its credentials are not those of that version any more"
            )
        return Answer(200, CredentialsView(job_id=record.job_id, credential_version=version + 1))

    async def renew_secret(self, call: Call) -> Answer:
        """A new webhook secret; the one before stays valid for a day."""
        if self._seal is None:
            raise InvalidJob(
                "this gateway has no key ring, so it cannot keep webhook secrets; give it a ring, "
                "or ask its operator for a line in webhooks.secrets"
            )
        made = await self._secrets.renew(call.caller.requester, self._seal)
        return Answer(201, SecretView(secret=made))

    async def _record(self, call: Call, job_id: str) -> JobRecord:
        if not _JOB_ID.fullmatch(job_id):
            raise _unknown()
        record = await self._ledger.get(job_id)
        if record is not None and call.reaches(record.requester, job_id):
            return record
        owner = None if record is not None else await self._ledger.pruned(job_id)
        if owner is not None and call.reaches(owner, job_id):
            raise Refused("gone", "the job has ended and was kept as long as agreed")
        raise _unknown()

    async def _new_job(self, call: Call) -> NewJob:
        body: CreateTranscode = call.body
        job_id, requester = uuid7(), call.caller.requester
        hook, refresh = body.status_webhook_url, body.refresh_url
        options: dict[str, Any] = {
            "status_webhook_url": check_called("status_webhook_url", hook, self._check_url),
            "refresh_url": check_called("refresh_url", refresh, self._check_url),
            "request_hash": request_hash(requester, body),
        }
        job, secrets = validate(body, self._check_url, files=self._files)
        if secrets != StorageCredentials():
            if self._seal is None:
                raise _no_ring("credentials" if body.credentials else "source.url")
            options |= await self._sealed(self._seal, secrets, job_id, requester)
        if hook or refresh:
            await self._check_secret("status_webhook_url" if hook else "refresh_url", requester)
        return NewJob(
            task=_TASK,
            payload=msgspec.json.encode(job),
            job_id=job_id,
            idempotency_key=idempotency_key(call.headers),
            requester=requester,
            max_attempts=body.max_attempts,
            priority=body.priority,
            options=options,
        )

    async def _sealed(
        self, seal: Seal, secrets: StorageCredentials, job_id: str, requester: str
    ) -> dict[str, Any]:
        if not self._keep_is_stored:
            settings = self._ledger.settings
            await self._credentials.keep(settings.queue, settings.keep_credentials)
            self._keep_is_stored = True
        sealed = await seal(msgspec.json.encode(secrets), job_id, requester, 1)
        return {**sealed, "credential_version": 1}

    async def _check_secret(self, field: str, requester: str) -> None:
        """Refuse an address that could never be called, because calls are signed."""
        if requester in self._with_secret or self._has_secret(requester):
            return
        if not await self._secrets.has(requester):
            raise Refused(
                "no_webhook_secret",
                f"{field}: calls to it are signed, and you have no webhook secret yet; make one "
                "with POST /transcode/webhook-secret, then send this again",
                field=field,
            )
        if len(self._with_secret) >= _REQUESTERS_MAX:
            self._with_secret.clear()
        self._with_secret.add(requester)

    def endpoints(self) -> list[Endpoint]:
        """The endpoints for the gateway."""
        return [_create(self.create), _status(self.status), *self._credential_endpoints()]

    def _credential_endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                method="PUT",
                path="/transcode/credentials",
                operation="replaceCredentials",
                summary="Give a job newer credentials",
                right=Right("jobs:write", "own", does="replace credentials"),
                tag="transcode",
                handle=self.refresh,
                takes=NewCredentials,
                replies={200: Reply("They are in place.", CredentialsView)},
                problems=(400, 404, 409, 410, 413, 415, 422),
            ),
            Endpoint(
                method="POST",
                path="/transcode/webhook-secret",
                operation="renewWebhookSecret",
                summary="Make a new webhook secret",
                description="Webhooks are signed with it from now on, and with the one before it "
                "too for a day.",
                right=Right("jobs:write", "own", does="renew webhook secret"),
                tag="transcode",
                handle=self.renew_secret,
                replies={201: Reply("The secret, shown this once.", SecretView)},
                problems=(404,),
            ),
        ]


def _create(handle: Handle) -> Endpoint:
    return Endpoint(
        method="POST",
        path="/transcode",
        operation="createTranscode",
        summary="Submit a transcode",
        description="The job is stored when the answer comes; nothing else is done here. With an "
        "Idempotency-Key the same request answers with the same job.",
        right=Right("jobs:write", "own", does="submit", audit="others"),
        tag="transcode",
        handle=handle,
        takes=CreateTranscode,
        example=_EXAMPLE,
        reads={"Idempotency-Key": IdempotencyKey},
        replies={
            202: Reply(
                "The job is stored.",
                Accepted,
                headers={
                    "Location": "Where its status can be read.",
                    "Idempotency-Replayed": "`true` when the job is an earlier one.",
                },
            )
        },
        problems=(400, 408, 409, 413, 415, 422),
    )


def _status(handle: Handle) -> Endpoint:
    return Endpoint(
        method="GET",
        path="/transcode/status",
        operation="readTranscode",
        summary="Read the status of a transcode",
        right=Right("jobs:read", "own"),
        tag="transcode",
        handle=handle,
        asks=AskStatus,
        replies={200: Reply("The job as it is now.", TranscodeView)},
        problems=(404, 410, 422),
    )


def _accepted(submitted: Submitted) -> Accepted:
    """The answer; for a repeated request, the answer that was stored with its key."""
    if submitted.response:
        return msgspec.json.decode(submitted.response, type=Accepted)
    return Accepted(job_id=submitted.job_id)


def _unknown() -> NotFound:
    return NotFound("there is no such job, or it is not yours")


def _no_ring(field: str) -> Refused:
    return Refused(
        "invalid",
        "this gateway has no key ring, so it cannot keep credentials nor what a source URL holds "
        "besides its address (user, password, query); leave them out, or give it a ring",
        field=field,
    )


def open_routes(queue: Submits, ledger: SqlLedger, *, ttl_s: int, **more: Any) -> list[Endpoint]:
    """The endpoints of a queue of this contract; an outbox has none.

    `ttl_s` is not used: `keep_ms` says how long jobs are kept. `more` has `redaction`, and may have
    `seal`, `check_url`, `has_secret` and `files`.
    """
    if ledger.is_outbox:
        return []
    return _InboxRoutes(queue, ledger, **more).endpoints()
