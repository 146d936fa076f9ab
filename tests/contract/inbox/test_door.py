"""What POST /transcode lets in: checked whole, and nothing that could never be done or called."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tenure.cli.config import Config
from tenure.cli.keys import open_seal
from tenure.core.outcome import Failure
from tenure.egress import Guard, Policy
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.vault import new_kek
from tenure.webhooks.signing import read_secrets
from tests.contract.gateway.web import JSON, Reply, Web
from tests.contract.inbox.conftest import RawSql
from tests.contract.inbox_stage import InboxStage
from tests.contract.suite.acting import claim_one, settle

BODY: dict[str, Any] = {
    "source": {"url": "s3://media/in/clip.mov"},
    "outputs": [{"name": "720p.mp4", "format": "mp4"}],
    "destination": {"url": "s3://media/out"},
}
KEYS = {"access_key_id": "AKID", "secret_access_key": "secret"}


def lent(tmp_path: Any, secrets: str = "") -> dict[str, Any]:
    config = Config({"TENURE_VAULT_KEYS": new_kek("door")}, tmp_path)
    given: dict[str, Any] = {"seal": open_seal(config), "check_url": Guard(Policy()).check_url}
    return given | ({"has_secret": read_secrets(secrets).has} if secrets else {})


@pytest.fixture
async def web(inbox: InboxStage, sql: RawSql, tmp_path: Any) -> AsyncGenerator[Web]:
    await inbox.ledger.counts()
    await sql("DELETE FROM webhook_secrets")
    settings = GatewaySettings(queues=(inbox.url,), port=0, route_options=lent(tmp_path))
    async with serving(settings) as running:
        yield Web(running.url)
    await sql("DELETE FROM webhook_secrets")


async def post(web: Web, body: Any) -> Reply:
    return await web.send("POST", "/transcode", json.dumps(body).encode(), JSON)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"source": {}}, "source.url", "s3://bucket/key"),
    ({"source": {"url": 7}}, "source.url", "str"),
    ({"source": {"url": "ftp://h/x"}}, "source.url", "https://"),
    ({"source": {"url": "s3://bucket"}}, "source.url", "s3://bucket/key"),
    ({"source": {"url": "s3://b/k?sig=x"}}, "source.url", "no query"),
    ({"source": {"url": "az://c/k"}}, "source.account", "storage account"),
    ({"source": {"url": "http://10.0.0.1/x"}}, "source.url", "https"),
    ({"source": {"url": "https://h.example/#x"}}, "source.url", "fragment"),
    ({"source": {"url": "gs://u:p@b/k"}}, "source.url", "without a user"),
    ({"source": {"url": "s3://b/k", "endpoint": "x"}}, "source.endpoint", "http"),
    (
        {"source": {"url": "https://h.example/x", "endpoint": "https://u:p@h.example"}},
        "source.endpoint",
        "without user",
    ),
    (
        {"source": {"url": "file:///a/b", "endpoint": "https://h.example/?sig=x"}},
        "source.endpoint",
        "query",
    ),
    (
        {
            "destination": {"endpoint": "secret"},
            "credentials": {"destination": {"signed_urls": {"720p.mp4": "https://h.example/b"}}},
        },
        "destination.endpoint",
        "http",
    ),
    ({"source": {"url": "s3://b/k", "region": "eu-1\n"}}, "source.region", "regex"),
    ({"outputs": [{"name": "a.mp4\n", "format": "mp4"}]}, "outputs[0].name", "regex"),
    ({"source": {"url": "s3://b/k", "region": "a b"}}, "source.region", "regex"),
    ({"source": {"url": "s3://b/k", "secret": "x"}}, "source.secret", "unknown field"),
    ({"destination": {}}, "destination.url", "720p.mp4 has none"),
    ({"destination": {"url": "https://h.example/x"}}, "destination.url", "signed URLs"),
    ({"outputs": []}, "outputs", "length >= 1"),
    ({"outputs": [{"name": "a.mp4"}]}, "outputs[0].format", "missing"),
    ({"outputs": [{"name": "a", "format": "avi"}]}, "outputs[0].format", "one of mp4, webm"),
    ({"outputs": [{"name": "../a", "format": "mp4"}]}, "outputs[0].name", "regex"),
    ({"outputs": [{"name": "a", "format": "mp4", "height": 7}]}, "outputs[0].height", "multiple"),
    ({"outputs": [{"name": "a", "format": "mp3"}] * 2}, "outputs", "name of its own"),
    ({"credentials": {"key": "AKIA"}}, "credentials.key", "unknown field"),
    (
        {"credentials": {"source": {"access_key_id": "A"}}},
        "credentials.source.secret_access_key",
        "an id and a secret",
    ),
    (
        {"credentials": {"destination": {"signed_urls": {"b": "https://h.example/b"}}}},
        "credentials.destination.signed_urls.b",
        "name of an output",
    ),
    ({"credentials": {"source": {"signed_url": "x"}}}, "credentials.source.signed_url", "http"),
    ({"status_webhook_url": "https://h.example/x?token=1"}, "status_webhook_url", "query"),
    ({"status_webhook_url": "https://127.0.0.1/x"}, "status_webhook_url", "public"),
    ({"refresh_url": "ftp://h.example/x"}, "refresh_url", "http or https"),
]


@pytest.mark.clause("I-70")
async def test_what_no_worker_could_do_is_refused_by_the_name_of_its_field(
    web: Web, inbox: InboxStage
) -> None:
    for wrong, field, right in WRONG:
        reply = await post(web, BODY | wrong)
        assert (reply.status, reply.json.get("field")) == (422, field), (wrong, reply.body)
        assert right in reply.json["detail"], (wrong, reply.json["detail"])
    assert (await inbox.ledger.counts()).states["queued"] == 0


@pytest.mark.clause("I-70")
async def test_the_document_tells_the_whole_shape_of_a_request(web: Web) -> None:
    schemas = (await web.get("/openapi.json")).json["components"]["schemas"]
    request = schemas["CreateTranscode"]["properties"]
    assert request["source"]["$ref"].endswith("/Place")
    assert request["outputs"]["items"]["$ref"].endswith("/Output")
    assert schemas["Output"]["properties"]["format"]["enum"]
    assert "access_key_id" in schemas["StorageKeys"]["properties"]


@pytest.mark.clause("I-71")
async def test_without_a_key_ring_no_secret_is_taken(inbox: InboxStage) -> None:
    async with serving(GatewaySettings(queues=(inbox.url,), port=0)) as running:
        web = Web(running.url)
        for body in (
            BODY | {"source": {"url": "https://h.example/clip?sig=x"}},
            BODY | {"source": {"url": "s3://key:secret@b/k"}},
            BODY | {"credentials": {"source": KEYS}},
        ):
            reply = await post(web, body)
            assert (reply.status, "key ring" in reply.json["detail"]) == (422, True), reply.body
            assert reply.json["field"] in ("source.url", "credentials")
        assert (await post(web, BODY)).status == 202


@pytest.mark.clause("I-71")
async def test_what_a_source_holds_besides_its_address_is_sealed(
    web: Web, inbox: InboxStage, sql: RawSql
) -> None:
    reply = await post(web, BODY | {"source": {"url": "https://u:p@h.example/clip?sig=x"}})
    assert reply.status == 202
    record = await inbox.ledger.get(reply.json["job_id"])
    assert record is not None
    assert json.loads(record.payload)["source"]["url"] == "https://h.example/clip"
    assert record.extra["credential_version"] == 1


@pytest.mark.clause("I-71")
async def test_a_source_with_an_upper_case_scheme_is_stored_and_sealed_with_a_lower_case_one(
    web: Web, inbox: InboxStage
) -> None:
    for url, version in (("HTTPS://h.example/clip", 0), ("HTTPS://h.example/clip?sig=x", 1)):
        reply = await post(web, BODY | {"source": {"url": url}})
        assert reply.status == 202
        record = await inbox.ledger.get(reply.json["job_id"])
        assert record is not None
        assert json.loads(record.payload)["source"]["url"] == "https://h.example/clip"
        assert record.extra.get("credential_version", 0) == version


@pytest.mark.clause("I-73")
@pytest.mark.parametrize("field", ["status_webhook_url", "refresh_url"])
async def test_an_address_to_call_is_refused_until_there_is_a_secret_to_sign_with(
    web: Web, field: str
) -> None:
    body = BODY | {field: "https://requester.example/hook"}
    refused = await post(web, body)
    assert (refused.status, refused.json["code"]) == (422, "no_webhook_secret")
    assert refused.json["field"] == field
    assert "POST /transcode/webhook-secret" in refused.json["detail"]
    assert (await web.post("/transcode/webhook-secret")).status == 201
    assert (await post(web, body)).status == 202


@pytest.mark.clause("I-73")
async def test_the_operators_own_secrets_are_good_for_a_webhook(
    inbox: InboxStage, tmp_path: Any
) -> None:
    given = lent(tmp_path, f"* = whsec_{'A' * 43}=")
    async with serving(
        GatewaySettings(queues=(inbox.url,), port=0, route_options=given)
    ) as running:
        body = BODY | {"status_webhook_url": "https://requester.example/hook"}
        assert (await post(Web(running.url), body)).status == 202


@pytest.mark.clause("I-34")
async def test_a_job_that_succeeded_shows_no_error_of_an_earlier_attempt(
    web: Web, inbox: InboxStage
) -> None:
    job_id = (await post(web, BODY)).json["job_id"]
    queue = inbox.queue("w1")
    failure = Failure(code="http_503", message="storage was away")
    await settle(queue, await claim_one(queue), "retry", failure=failure)
    waiting = (await web.get(f"/transcode/status?job_id={job_id}")).json
    assert waiting["error"]["code"] == "http_503"
    await settle(queue, await claim_one(queue), "complete")
    done = (await web.get(f"/transcode/status?job_id={job_id}")).json
    assert (done["status"], "error" in done) == ("succeeded", False)
    record = await inbox.ledger.get(job_id)
    assert record is not None
    assert record.error == b""


@pytest.mark.clause("I-72")
@pytest.mark.parametrize("kind", ["complete", "bury", "cancel while queued"])
@pytest.mark.parametrize("kept", [False, True])
async def test_credentials_end_with_their_job_unless_the_queue_keeps_them(
    inbox: InboxStage, sql: RawSql, tmp_path: Any, kind: str, kept: bool
) -> None:
    url = f"{inbox.url}&keep_credentials={str(kept).lower()}"
    async with serving(
        GatewaySettings(queues=(url,), port=0, route_options=lent(tmp_path))
    ) as running:
        made = await post(Web(running.url), BODY | {"credentials": {"source": KEYS}})
        job_id = made.json["job_id"]
        sealed = "SELECT storage_creds_encrypted IS NOT NULL, storage_creds_kek_id IS NOT NULL FROM"
        assert [tuple(map(bool, row)) for row in await sql(f"{sealed} inbox_jobs")] == [
            (True, True)
        ]
        if kind == "cancel while queued":
            assert await inbox.ledger.cancel([job_id]) == ["ok"]
        else:
            queue = inbox.queue("w1")
            await settle(queue, await claim_one(queue), kind)  # type: ignore[arg-type]
        assert [tuple(map(bool, row)) for row in await sql(f"{sealed} inbox_jobs")] == [
            (kept, kept)
        ]


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("url", ["file:///etc/passwd", "FILE:///etc/passwd", "file:/etc/passwd"])
async def test_a_place_on_the_workers_own_disk_is_refused_where_no_folder_is_permitted(
    inbox: InboxStage, tmp_path: Any, side: str, url: str
) -> None:
    given = {**lent(tmp_path), "files": False}
    settings = GatewaySettings(queues=(inbox.url,), port=0, route_options=given)
    body = {
        "source": {"url": "s3://b/k"},
        "destination": {"url": "s3://b/out"},
        "outputs": [{"name": "a.jpg", "format": "jpg"}],
    }
    async with serving(settings) as running:
        refused = await post(Web(running.url), body | {side: {"url": url}})
        assert (await post(Web(running.url), body)).status == 202
    assert refused.status == 422
    assert refused.json["field"] == f"{side}.url"
    assert "file:// is not permitted" in refused.json["detail"]
